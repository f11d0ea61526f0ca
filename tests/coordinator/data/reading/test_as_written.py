"""A row reaches scorers and templates as it was written, whatever stands beside it and in whichever form of file."""

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP, Completion, PolicyStamp

from services.common.config.data import DataConfig
from services.common.config.sft import SftDataConfig
from services.common.errors import InvalidInput
from services.common.rpc.server import Server
from services.coordinator.clients.reward import Reward
from services.coordinator.data.groups import SampledGroup
from services.coordinator.data.prompts import PromptDataset, load_eval
from services.coordinator.data.supervised import SftDataset
from services.coordinator.text.tokenizer import Tokenizer
from services.reward.servicer import RewardServicer
from tests.coordinator.fake_services import TOKENIZER, make_config
from tests.support import PATIENCE_S, raises

NUMBERS = st.integers() | st.sampled_from([10**4000, 2**63, -(2**63) - 1, 0.5, -0.0, 1e300, 5e-324])
PLAIN = st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["tests", "level", "a", ""]) | st.text(), VALUES), min_size=1, max_size=4
)
BASE = {"prompt": "a", "answer": "1"}


def load(path: Path, tokenizer: Tokenizer, **keys: Any) -> PromptDataset:
    config = DataConfig.model_validate({"train": path, "prompts_per_step": 1, "shuffle": False} | keys)
    return PromptDataset.load(config, tokenizer, seed=0)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[PromptDataset], list[float]]]:
    """Scores each prompt with a user's function, in a worker process of a reward service that is called over gRPC."""
    monkeypatch.chdir(Path(__file__).parents[3] / "reward")
    scorers = {"scorers": [{"kind": "python", "path": "reward_functions:as_written"}], "num_workers": 1}
    config = make_config(reward={**scorers, "timeout_s": PATIENCE_S, "on_failure": "fail"})
    loop, servicer = asyncio.new_event_loop(), RewardServicer()

    async def begin() -> tuple[Server, Reward]:
        server = Server()
        reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
        port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService"])
        reward = Reward(f"127.0.0.1:{port}", config)
        await reward.open("run")
        return server, reward

    async def score(data: PromptDataset) -> list[float]:
        completions = [Completion(tokens=[7], finish_reason=FINISH_REASON_STOP)]
        groups = [SampledGroup(0, prompt, completions, PolicyStamp()) for prompt in data.prompts]
        scored_groups = [await reward.score(group, TOKENIZER) for group in groups]  # type: ignore[arg-type]
        return [reward for group in scored_groups if group for reward in group.rewards.tolist()]

    async def end() -> None:
        await reward.close()
        await servicer.close()
        await server.grpc.stop(0)

    server, reward = loop.run_until_complete(begin())
    try:
        yield lambda data: loop.run_until_complete(score(data))
    finally:
        loop.run_until_complete(end())
        loop.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=ROWS, name=st.sampled_from(["x.jsonl", "x.json", "x.jsonl.gz"]), is_ascii=st.booleans())
def test_scorers_get_what_the_file_has(
    scored: Callable[[PromptDataset], list[float]],
    tokenizer: Tokenizer,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    name: str,
    is_ascii: bool,
) -> None:
    others = [{key: value for key, value in row.items() if key not in ("prompt", "answer", "written")} for row in rows]
    lines = [json.dumps({**BASE, **row, "written": json.dumps(row)}, ensure_ascii=is_ascii) for row in others]
    content = (f"[{','.join(lines)}]" if name == "x.json" else "\n".join(lines)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert scored(load(tmp_path / name, tokenizer)) == [1.0] * len(rows)


def test_the_comparison_notices_a_changed_row(
    scored: Callable[[PromptDataset], list[float]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    changed = [('{"a": 3}', {"a": 3.0}), ('{"a": 1}', {"a": 1, "b": None}), ('{"a": 1, "b": 2}', {"b": 2, "a": 1})]
    lines = [json.dumps({**BASE, **row, "written": written}) for written, row in changed]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert scored(load(tmp_path / "x.jsonl", tokenizer)) == [0.0] * len(changed)


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_templates_get_what_the_file_has(make_model: Callable[..., Path], tmp_path: Path, name: str) -> None:
    turns: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "call": {"city": "Rome"}}],
        [{"role": "user", "content": "x", "n": None}, {"content": "y", "role": "assistant", "call": {"a": [3, 0.5]}}],
    ]
    (tmp_path / name).write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    template = "{% for m in messages %}{{ m | tojson }}{{ '<|im_end|>' if m.role == 'assistant' }}{% endfor %}"
    tokenizer = Tokenizer.load(make_model(template))
    config = SftDataConfig(train=(tmp_path / name,), samples_per_step=1, messages_column="messages")
    examples = SftDataset.load(config, tokenizer, seed=0).examples
    for (prompt, answer), example in zip(turns, examples, strict=True):
        assert tokenizer.decode(example.prompt_tokens.tolist()) == json.dumps(prompt)
        assert tokenizer.decode(example.tokens.tolist()) == json.dumps(answer)
    prompts = [{"prompt": messages[:1], "answer": "1"} for messages in turns]
    (tmp_path / name).write_text("\n".join(map(json.dumps, prompts)))
    assert [prompt.text for prompt in load(tmp_path / name, tokenizer).prompts] == [json.dumps(m[0]) for m in turns]


UNUSABLE = [
    ("NaN", "holds NaN, which is not JSON"),
    ("[-Infinity]", "holds -Infinity, which is not JSON"),
    ("1e400", "holds 1e400, which is above the largest number"),
    ("1" * 5000, "holds an integer of 5000 digits"),
    (r'"\ud83d"', r"holds '\\ud83d', half of a character of UTF-16"),
    (r'{"\ud83d": 1}', r"holds '\\ud83d', half of a character of UTF-16"),
    ('{"k": {"a": 1, "b": 2, "a": 1}}', "holds the key 'a' twice"),
    ('1, "note": 1', "holds the key 'note' twice"),
]


@pytest.mark.parametrize(("value", "why"), UNUSABLE)
def test_what_cannot_be_passed_on_is_a_bad_row_if_it_is_read(
    tokenizer: Tokenizer, tmp_path: Path, value: str, why: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "answer": "1", "note": 1}\n{"prompt": "b", "answer": "2", "note": ' + value + "}")
    with pytest.raises(InvalidInput, match=rf"1 of 2 rows that are bad: .* line 2: column note {why} \(counted"):
        load(path, tokenizer)
    assert len(load(path, tokenizer, bad_rows="drop")) == 1
    assert [prompt.extra for prompt in load(path, tokenizer, extra_columns=[]).prompts] == [{}, {}]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"prompt": 1, "answer": "1"}', "the prompt is a number, not text or a list of messages"),
        ('{"prompt": NaN, "answer": "1"}', "the prompt is NaN, which is not JSON, not text or a list of messages"),
        ('{"answer": "1"}', "the prompt is null"),
        ('{"prompt": "a", "answer": 1.5}', "the answer is a number, not text"),
        ('{"prompt": "a"}', "the answer is null"),
        (r'{"prompt": "\ud83d", "answer": "1"}', r"column prompt holds '\\ud83d', half of a character"),
        ('{"prompt": ["a"], "answer": "1"}', "message 0 of the prompt is text, not an object"),
        (
            '{"prompt": [{"role": "user", "content": 1}], "answer": "1"}',
            "the content of message 0 of the prompt is a number, not text",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}',
            "the prompt is a list, but the file's first one is text: set data.chat to have both",
        ),
        ('{"prompt": "a", "answer": "1", "level": 0.5}', "column level, data.metrics_column, is a number, not text"),
    ],
)
def test_a_row_of_another_type_is_a_bad_row(tokenizer: Tokenizer, tmp_path: Path, row: str, why: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "1", "level": 1}\n' + row)
    with pytest.raises(InvalidInput, match=f"1 of 2 rows that are bad: .* line 2: {why}"):
        load(tmp_path / "x.jsonl", tokenizer, metrics_column="level")


def test_with_chat_a_file_may_have_text_and_messages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompts = ["x", [{"role": "user", "content": "x"}]]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts))
    first, second = load(tmp_path / "x.jsonl", tokenizer, chat=True).prompts
    assert first.tokens == second.tokens
    assert (first.row_prompt, list(second.row_prompt)) == ("x", prompts[1])


def test_a_column_that_nobody_reads_costs_nothing(tokenizer: Tokenizer, write_parquet: Callable[..., Path]) -> None:
    times = pa.array([2**61, 0], pa.timestamp("ms"))  # a year that Python does not have
    path = write_parquet(prompt=["a", "b"], answer=["1", "2"], image=[b"x", b"y"], time=times)
    assert len(load(path, tokenizer, extra_columns=[])) == 2


def test_a_name_of_two_columns_of_parquet(tokenizer: Tokenizer, tmp_path: Path) -> None:
    table = pa.table([["a"], ["1"], ["x"], ["y"]], names=["prompt", "answer", "note", "note"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InvalidInput, match="row 1: column note holds the values of several columns of this name"):
        load(tmp_path / "x.parquet", tokenizer)
    assert len(load(tmp_path / "x.parquet", tokenizer, extra_columns=[])) == 1


def test_lines_after_those_that_are_wanted_are_not_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "1"}\nnot JSON\n')
    config = DataConfig.model_validate({"train": "x", "prompts_per_step": 1, "eval": {"x": tmp_path / "x.jsonl"}})
    with raises(InvalidInput, field="data.eval.x"):
        load_eval(config, tokenizer)
    assert len(load_eval(config.model_copy(update={"max_eval_prompts": 1}), tokenizer)["x"]) == 1


def test_integers_are_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": 12}\n{"prompt": "b", "answer": -3}\n')
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [12, -3]}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        assert [prompt.answer for prompt in load(tmp_path / name, tokenizer).prompts] == ["12", "-3"]
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": true}\n{"prompt": "b", "answer": false}\n')
    with pytest.raises(InvalidInput, match="not text or integers"):
        load(tmp_path / "x.jsonl", tokenizer)


def test_no_message_is_left_out(tokenizer: Tokenizer, tmp_path: Path, make_model: Callable[[str], Path]) -> None:
    chat = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a"}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": chat, "answer": "1"}))
    assert "Be brief." in load(tmp_path / "x.jsonl", tokenizer).prompts[0].text
    shown = "{% for m in messages if m.role != 'developer' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidInput, match="line 1: the chat template leaves out a message of role developer"):
        load(tmp_path / "x.jsonl", Tokenizer.load(make_model(shown)))
