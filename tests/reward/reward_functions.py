"""Defines scorers as users write them, good and bad; workers import this file by name."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def with_bonus(*, completion, answer, extra, num_tokens, finish_reason, prompt, bonus=0.0):
    print("functions may print", file=sys.stdout)  # noqa: T201
    fields = (prompt, extra, num_tokens, finish_reason)
    return float(completion == answer and fields == ("p", {"level": 3}, 7, "stop")) + bonus


def as_written(*, extra, **_):
    """Returns 1.0 if the row is, to the byte, what its own column `written` says."""
    return float(json.dumps({name: value for name, value in extra.items() if name != "written"}) == extra["written"])


async def slowly(*, completion, **_):
    await asyncio.sleep(0.01)
    return len(completion)


def two_arguments(prompt, completion):
    return 1.0


def raises(**_):
    raise KeyError("column")


def stops_to_debug(**_):
    breakpoint()


def close_to(*, completion, answer, **_):
    return np.isclose(float(completion), float(answer))


def not_a_number(**_):
    return float("nan")


def nothing(**_):
    return None


def text(**_):
    return "1.0"


def hangs(**_):
    while True:
        pass


def exits(**_):
    os._exit(3)


def exits_while_answering(**_):
    os.write(4, b'{"score": 1.0')  # where worker.py keeps its end of the pipe
    os._exit(3)


def answers_nonsense(**_):
    os.write(4, b"1.0 is it\n")


def answers_for_ever(**_):
    while True:
        os.write(4, bytes(1 << 16))


def takes_memory(**_):
    return len(bytearray(8 << 30))


def leaves(**_):
    sys.exit("no such column")


def leaves_child(*, extra, **_):
    child, file = subprocess.Popen(["sleep", "600"]), Path(extra["pid_file"])
    file.with_suffix(".part").write_text(str(child.pid))
    file.with_suffix(".part").rename(file)
    if "exit" in extra:
        os._exit(3)
    time.sleep(600)


def ranks(*, completion, answer, prompt, extra, num_tokens, finish_reason, scale=1, **_):
    """Returns, for each sample of a group, `scale` times the share of its samples that are shorter."""
    assert [len(set(map(str, column))) for column in (answer, prompt, extra, finish_reason)] == [1] * 4
    return [scale * sum(other < mine for other in num_tokens) / len(completion) for mine in num_tokens]


async def of_group(*, completion, **_):
    """Returns wrong scores of the kind that the first completion names; `hang` never returns."""
    kind = completion[0]
    if kind == "hang":
        time.sleep(600)
    return {
        "wordy": ["é" * 1000] * 64,
        "few": [1.0],
        "number": 1.0,
        "by sample": dict.fromkeys(range(len(completion)), 0.5),
        "set": {0.0, 0.5, 1.0, 2.0},
        "mixed": [1.0, float("nan"), "2", 10**400][: len(completion)],
    }[kind]


def by_completion(*, completion, extra, **_):
    """Returns the number that the completion is, or creates a file in extra["hanging"] and hangs.

    It hangs until somebody writes into the pipe extra["until"], if there is one.
    """
    if completion != "hang":
        return float(completion)
    (Path(extra["hanging"]) / str(os.getpid())).touch()
    return float(Path(extra["until"]).read_text()) if "until" in extra else time.sleep(600)


async def all_at_once(*, completion, extra, **_):
    """Returns the completion's number once `extra["together"]` calls are in progress, or does what it says."""
    if completion == "raise":
        raise KeyError("column")
    if completion == "cancel":
        raise asyncio.CancelledError
    if completion == "panic":  # as a library in Rust does
        raise BaseException("panic")
    if completion == "wait":
        await asyncio.Event().wait()
    if completion == "block":
        time.sleep(600)
    if completion == "exit":
        os._exit(3)
    GATES.setdefault(os.getpid(), asyncio.Barrier(extra["together"]))
    await GATES[os.getpid()].wait()
    return float(completion)


GATES = {}


def dies_once(*, completion, extra, **_):
    """Ends its process with the first call for each completion."""
    number = completion if isinstance(completion, str) else completion[0]
    try:
        (Path(extra["died"] if isinstance(extra, dict) else extra[0]["died"]) / number).touch(exist_ok=False)
    except FileExistsError:
        return float(number) if isinstance(completion, str) else [float(one) for one in completion]
    os._exit(3)


async def dies_once_async(**fields):
    return dies_once(**fields)


def trl_accuracy(completions, solution, **kwargs):
    """As TRL's own rewards are written: messages in, and None where there is nothing to judge."""
    texts = [completion[0]["content"] for completion in completions]
    return [None if text == "skip" else float(text == gold) for text, gold in zip(texts, solution, strict=True)]


def reads_solution(*, completion, extra, **_):
    return float(completion == extra["solution"])


def reads_integer(*, completion, answer, extra, column, **_):
    return float(int(completion) == extra.get(column, answer))


def trl_integer_answer(completions, answer, **_):
    return [float(int(text) == right) for text, right in zip(completions, answer, strict=True)]


def trl_integer_solution(completions, solution, **_):
    return trl_integer_answer(completions, solution)


async def trl_shortest(prompts, completions, answer, bonus=0.0, **kwargs):
    await asyncio.sleep(0)
    assert isinstance(prompts[0], str) and kwargs["level"] == [3] * len(prompts)
    pairs = zip(completions, answer, strict=True)
    return [bonus + (text == min(completions, key=len) and text == gold) for text, gold in pairs]


def trl_continues(completions, prompts, **kwargs):
    assert all([message["role"] for message in prompt] == ["user"] for prompt in prompts)
    return np.array([completion[0]["content"] == "<think>4" for completion in completions])


def trl_own_messages(completions, prompts, messages):
    """Has a parameter of its own that is named as a field of rows."""
    return [messages * len(prompts[0]) for _ in completions]


def trl_lengths(completions, **kwargs):
    return [len(ids) for ids in kwargs.get("completion_ids")]


def trl_guards(completions, **kwargs):
    return [1.0 if kwargs.get("trainer_state") else 0.0 for _ in completions]


def trl_token_ids(completion_ids, completions, **kwargs):
    return [sum(ids) for ids in completion_ids]


def trl_curriculum(completions, trainer_state=None):
    return [1.0 for _ in completions]


def trl_logs(completions, log_extra=None, **kwargs):
    """As TRL's accuracy_reward does: records what it is given to record with."""
    assert log_extra
    log_extra("solution", ["4"] * len(completions))
    kwargs["log_metric"]("accuracy", 0.5)
    return [1.0 for _ in completions]


class _Penalty:
    def __call__(self, completion_ids, **kwargs):
        return [-len(ids) for ids in completion_ids]


trl_penalty = _Penalty()


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's own rewards are written."""
    assert data_source == "openai/gsm8k" and extra_info == {"index": 7}
    return {"score": solution_str == str(ground_truth), "acc": 1.0, "type": type(ground_truth).__name__}


async def verl_async(data_source, solution_str, ground_truth, extra_info, scale=1.0, **kwargs):
    await asyncio.sleep(0)
    return scale * (solution_str == ground_truth) + len(kwargs)


def verl_with_router(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    return 1.0


def own_completions(completion, completions, **_):
    return len(completion) * completions
