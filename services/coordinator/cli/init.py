"""Implements `lockstep init`, which writes a config with comments for a model, a file of prompts and this host's
GPUs."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from services.common.errors import InvalidInput, counted
from services.common.families.architecture import read_architecture, read_content
from services.common.families.registry import FAMILIES
from services.coordinator.data.reading.columns import is_answer, is_messages, is_prompt, types_with_fields, value_of
from services.coordinator.data.reading.hub import local_model
from services.coordinator.data.reading.sources import Rows, files_of, read_rows
from services.coordinator.text.tokenizer import Tokenizer

Value = TypeVar("Value")

_PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "input")
_ANSWERS = ("answer", "solution", "target", "label", "ground_truth", "output")
_ANSWERS += ("reward_model.ground_truth", "reward_spec.ground_truth")  # of verl and SkyRL
_POSITIONS = 4096
"""Number of positions to assume if a model's config.json does not say it."""


@dataclass(frozen=True)
class _Sizes:
    prompts: int
    samples: int
    prompt_tokens: int
    model_len: int
    tokens_per_microbatch: int


_ON_GPU = _Sizes(64, 8, 1024, 3072, 16384)
_ON_CPU = _Sizes(8, 4, 256, 512, 2048)
_RATES = {10e6: 3e-4, 50e6: 1e-4, 200e6: 1e-5}
"""Maps a number of parameters to the learning rate of models that have fewer, as in docs/tuning.md."""
_RATE = 1e-6
"""Learning rate of all larger models, and of those whose parameters are not counted."""

_TEMPLATE = """\
# Written by `lockstep init` for {gpus}.
# Next: {fitting}`lockstep doctor {file}`, then `lockstep run {file}`. `lockstep config` lists every key.
name: {name}
model: {model}{family}
num_steps: 100                   # each step generates, scores, trains once and publishes the new weights{placement}
data:
  train: {train}
  # eval: {{held-out: test.parquet}}   # rows to evaluate on; see evaluation below
  prompt_column: {prompt}
  answer_column: {answer}        # passed to the scorers
  prompts_per_step: {sizes.prompts}           # times completions_per_prompt: the samples of a step
  max_prompt_tokens: {sizes.prompt_tokens}
  overlong: drop                 # leave out longer prompts; `fail` names them{chat}
rollout:
  num_replicas: {replicas}                # engines that generate{replica_gpus}
  completions_per_prompt: {sizes.samples}      # samples that are compared with each other
  max_model_len: {length}
  sampling: {{temperature: 1.0, max_tokens: {completion}}}   # max_tokens: the longest completion
reward:
  scorers:                       # docs/algorithms.md lists the kinds: math, code, judge, http, python, ...
    - {scorer}   # {why_scorer}
trainer:
  strategy: fsdp                 # or megatron, for tensor, pipeline and expert parallelism
  num_ranks: {ranks}
  max_tokens_per_microbatch: {budget}   # lower it if the trainer runs out of memory: `lockstep plan {file}`
  optim: {{lr: {lr:.1e}}}   # {why_lr}; see docs/tuning.md
# evaluation: {{eval_freq: 10}}    # every 10 steps, with data.eval
checkpoint: {{save_freq: 20}}      # the same command resumes from the newest
"""

_TESTS = ("tests", "test_cases", "test_list")
_SCORERS = {
    "code": "1 if the program in the completion passes the tests, else 0; needs bubblewrap",
    "gsm8k": "1 if the last number (after #### if there is one) is the answer's, else 0",
    "math": "1 if the last \\boxed{} equals the answer, else 0",
    "exact": "1 if the completion is the answer, else 0",
}
_NUM_READ = 200
"""Number of rows whose answers decide the scorer."""
_MANY_WORDS = 8
"""Number of words above which an answer is a text, which no completion repeats."""
_END = 200
"""Characters at the end of a prompt that say in which form the answer is expected."""


def starting_config(model: Path, train: Path, file: Path, *, num_gpus: int) -> str:
    """Returns the YAML of a config that `lockstep plan` accepts.

    Args:
        model: A directory in the Hugging Face format, or the id of a model on the Hub.
        train: The file of prompts.
        file: Where the config will be written; its name is the run's.
        num_gpus: GPUs that the run can use; 0 computes on the CPU.

    Raises:
        LockstepError: The model or the file cannot be read, or the file has no column of prompts or of answers.
    """
    sizes = _ON_GPU if num_gpus else _ON_CPU
    directory = Path(local_model(str(model), has_weights=False, field="--model"))
    content = read_content(directory)
    is_known = content.get("model_type") in FAMILIES
    count = read_architecture(directory).num_parameters if is_known else None
    rows = read_rows(files_of(train, field="--data")[0], field="--data")
    prompt = _column(rows, _PROMPTS, "prompts", is_prompt, "text or a list of {role, content}")
    answer = _column(rows, _ANSWERS, "answers", is_answer, "text or integers")
    kind, tests = _scorer(rows, prompt, answer)
    length = min(sizes.model_len, content.get("max_position_embeddings") or _POSITIONS)
    prompt_tokens = min(sizes.prompt_tokens, length // 2)
    sizes = replace(sizes, prompt_tokens=prompt_tokens, prompts=min(sizes.prompts, len(rows)))
    ranks = max(1, num_gpus // 2)  # one GPU is shared; of several, half train and the others generate
    replicas = max(1, num_gpus - ranks)
    shared = "\nplacement: colocated            # trainer and engine take turns on the GPU"
    is_text_of_chat = Tokenizer.load(directory).has_chat_template and not is_messages(rows.types[prompt])
    chat = "\n  chat: true                     # text prompts become a user message of the chat template"
    argument = shlex.quote(str(file))
    text = _TEMPLATE.format(
        gpus=counted(num_gpus, "GPU") if num_gpus else "a host without GPUs: sizes for a first try on the CPU",
        fitting=f"`lockstep plan {argument} --suggest` lists placements that fit the GPUs;\n# " if num_gpus else "",
        placement=shared if num_gpus == 1 else "",
        file=argument,
        name=json.dumps(_name_of(file)),
        model=json.dumps(str(model)),
        family=f"   # {content.get('model_type')}{f', {_size_of(count)}' if count else ''}",
        lr=next((rate for least, rate in _RATES.items() if count and count < least), _RATE),
        why_lr=f"usual for {_size_of(count)}" if count else "usual for models of 0.2B parameters and more",
        train=json.dumps(str(train)),
        prompt=json.dumps(prompt),
        answer=json.dumps(answer),
        scorer=_options(kind, tests),
        why_scorer=_SCORERS[kind],
        sizes=sizes,
        chat=chat if is_text_of_chat else "",
        replicas=replicas,
        replica_gpus=", each on one GPU" if num_gpus > 1 else "",
        length=length,
        completion=length - prompt_tokens,
        ranks=ranks,
        budget=max(sizes.tokens_per_microbatch, 2 * length),
    )
    before = r'^(\s*[^\s#](?:"(?:[^"\\]|\\.)*"|[^"\n])*?) +# '  # a `#` within quotes begins no comment
    return re.sub(before, lambda line: f"{line[1] + ' ':<32} # ", text, flags=re.MULTILINE)


def _name_of(file: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-") or "run"


def _size_of(num_parameters: int) -> str:
    size = f"{num_parameters / 1e9:.1f}B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.1f}M"
    return f"{size} parameters"


def _column(rows: Rows, names: tuple[str, ...], what: str, fits: Callable[[pa.DataType], bool], kinds: str) -> str:
    """Returns the first of `names` whose type fits, which the error describes as `kinds`."""
    types = types_with_fields(rows.types)
    for name in names:
        if name in types and fits(types[name]):
            return name
    if present := [name for name in names if name in types]:
        message = f"--data: column {present[0]} is {types[present[0]]}, not {kinds}: convert it"
        if what == "answers":
            message += ", or write a config with any column of text as data.answer_column, and read this one from extra"
        raise InvalidInput(message, field="data")
    has = ", ".join(f"{name} ({kind})" for name, kind in rows.types.items())
    fix = "rename one" if what == "prompts" else "rename one, or write the config of a scorer that needs none yourself"
    raise InvalidInput(f"--data: no column of {what} ({', '.join(names)}) among {has}: {fix}", field="data")


def _scorer(rows: Rows, prompt: str, answer: str) -> tuple[str, str]:
    """Returns the kind of scorer that prompts and answers are written for, and the column of tests if it reads another
    one."""
    read = [row for _, row in islice(rows, _NUM_READ)]
    texts = [text for row in read if isinstance(text := value_of(row, answer), str) and text.strip()]
    for name in _TESTS:
        if name in rows.types and _is_true_of_most(_is_tests, [row.get(name) for row in read]):
            return "code", name
    if _is_true_of_most(_is_tests, texts):
        return "code", ""
    asked = [str(row.get(prompt)) for row in read]
    if _is_true_of_most(lambda text: "boxed{" in text[-_END:], asked):
        return "math", ""
    if _is_true_of_most(lambda text: "####" in text[-_END:], asked):
        return "gsm8k", ""
    if _is_true_of_most(lambda text: re.search(r"####[^\w\n]*[0-9]", text), texts):
        return "gsm8k", ""
    if _is_true_of_most(lambda text: re.search(r"\\[A-Za-z]+\s*\{|^\$.*\$$", text.strip()), texts):
        return "math", ""
    if _is_true_of_most(lambda text: len(text.split()) > _MANY_WORDS and re.search("[0-9]", text), texts):
        return "gsm8k", ""
    return "exact", ""


def _options(kind: str, tests: str) -> str:
    column = {"tests": "", "": ", tests_key: null"}.get(tests, f", tests_key: {tests}") if kind == "code" else ""
    return f"{{kind: {kind}{column}}}"


def _is_true_of_most(fits: Callable[[Value], object], values: Sequence[Value]) -> bool:
    return sum(bool(fits(value)) for value in values) * 2 > len(values)


def _is_tests(value: object) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    if isinstance(value, list):
        forms = (
            {"input", "output"} <= test.keys() if isinstance(test, dict) else "assert" in str(test) for test in value
        )
        return bool(value) and all(forms)
    return isinstance(value, dict) and bool(value.keys() & {"inputs", "asserts", "script"})
