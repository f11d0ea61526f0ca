"""Tests that a sample of a recent step is shown as a conversation, in few lines and as plain text."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.types.v1.types_pb2 import PolicyStamp
from rich.console import Console

from services.common.batches import SAMPLE_SCHEMA
from services.coordinator.daemon.client import _show
from services.coordinator.observe.terminal import LastSample, Terminal
from services.coordinator.runs.record import batch_path
from services.coordinator.runs.reporter import Reporter
from tests.coordinator.observe.test_reporters import STEP, make_console
from tests.support import make_batch

Part = pb.ConversationPart
PAGE = "a page " * 100
PARTS = (
    Part(text='I ask. <tool_call>\n{"name": "search"}\n</tool_call>', reward=0.25),
    Part(text=f"\nuser\n{PAGE}[red]\x1b[2Jevil\nassistant\n"),
    Part(text="Rome.", reward=1.0),
)
CONVERSATION = pb.Conversation(
    prompt_id="p7", sample=3, prompt="What is the capital?", parts=PARTS, reward=1.25, finish_reason="turn_limit"
)


class Kept(Reporter):
    shows_samples = True

    def __init__(self):
        self.shown: list[tuple[int, pb.Conversation]] = []

    def conversation(self, version: int, conversation: pb.Conversation) -> None:
        self.shown.append((version, conversation))


def lines(conversation: pb.Conversation, width: int, height: int) -> list[str]:
    terminal = Terminal(make_console(width, height, is_terminal=True), 9)
    terminal.conversation(4, conversation)
    terminal.step(4, STEP)
    terminal.close()
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(terminal._shown())
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "height"), [(40, 16), (80, 24), (160, 60)])
def test_a_conversation_is_below_the_table(width: int, height: int) -> None:
    found = lines(CONVERSATION, width, height)
    text = "\n".join(found)
    assert len(found) < height and max(map(len, found)) <= width
    assert found[1].split("┃")[1].strip() == "step"
    assert "step 4, prompt p7, sample 3: reward" in text
    assert "prompt What is the capital?" in text and "turn 2 Rome." in text and "+1.000" in text
    assert "\x1b" not in text
    if height > 16:
        assert "turn 1 I ask. <tool_call>" in text and "+0.250" in text and "turn_limit" in text
        assert " … " in text and "[red]\ufffd[2Jevil" in text and text.count(" reply user a page") == 1


def test_the_answer_is_the_last_line() -> None:
    answered = pb.Conversation(answer="Rome\n\x1b[2J " + "or Roma " * 500)
    answered.MergeFrom(CONVERSATION)
    found = lines(answered, 80, 24)
    place = next(number for number, line in enumerate(found) if "answer Rome \ufffd[2J or Roma" in line)
    assert "turn 2 Rome." in "\n".join(found[:place]) and len(found) < 24
    assert "answer" not in "\n".join(lines(CONVERSATION, 80, 24))


def test_a_watcher_sees_the_conversation_with_its_step() -> None:
    terminal = Terminal(make_console(80, 24, is_terminal=True), 9)
    numbers = pb.Numbers(version=4, values=STEP)
    _show(pb.WatchRunResponse(run=pb.Run(), step=numbers, conversation=CONVERSATION), terminal)
    terminal.close()
    console = Console(file=io.StringIO(), width=80, height=24, color_system=None)
    console.print(terminal._shown())
    assert "turn 2 Rome." in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_long_conversation_loses_its_middle() -> None:
    parts = [Part(text=f"turn number {number}", reward=float(number)) for number in range(40)]
    text = "\n".join(lines(pb.Conversation(prompt="?", parts=parts), 80, 24))
    assert "turn number 0" in text and "turn number 39" in text and "more" in text and "turn number 20" not in text


def test_the_first_episode_of_a_batch_is_shown(tmp_path: Path) -> None:
    rows = make_batch(2, 2, PolicyStamp(version=4, digest="d" * 32)).to_pylist()
    for row in rows:
        row |= {"tokens": [5, 6, 7, 8], "turn_begins": [0, 3], "turn_ends": [2, 4], "turn_rewards": [0.5, 0.0]}
        row |= {"logprobs": [0.0] * 4, "environment": "e 1", "advantages": None, "loss_mask": None}
    path = batch_path(tmp_path, 4)
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA), path)
    kept = Kept()
    LastSample(tmp_path, lambda tokens: ",".join(map(str, tokens)), kept).step(5, {})
    ((version, conversation),) = kept.shown
    assert version == 5 and conversation.prompt_id == rows[0]["prompt_id"]
    assert list(conversation.parts) == [Part(text="5,6", reward=0.5), Part(text="7"), Part(text="8", reward=0.0)]
    assert conversation.prompt == ",".join(map(str, rows[0]["prompt_tokens"]))


def test_a_completion_is_a_conversation_of_one_turn(tmp_path: Path) -> None:
    path = batch_path(tmp_path, 0)
    path.parent.mkdir()
    batch = make_batch(1, 2, PolicyStamp(version=0, digest="d" * 32))
    pq.write_table(batch.append_column("answer", pa.array(["42", "42"])), path)
    kept, row = Kept(), batch.to_pylist()[0]
    LastSample(tmp_path, lambda tokens: ",".join(map(str, tokens)), kept).step(1, {})
    ((_, conversation),) = kept.shown
    assert conversation.prompt == ",".join(map(str, row["prompt_tokens"])) and conversation.answer == "42"
    assert list(conversation.parts) == [Part(text=",".join(map(str, row["tokens"])), reward=row["reward"])]
    text = "\n".join(lines(conversation, 80, 24))
    assert "completion" in text and "turn 1" not in text


def test_output_that_is_no_terminal_reads_no_sample(tmp_path: Path) -> None:
    """There is no batch here, so reading a sample would raise an error."""
    terminal = Terminal(make_console(80, 24, is_terminal=False), 9)
    LastSample(tmp_path, str, terminal).step(1, {})


def test_samples_of_some_steps_are_shown(tmp_path: Path) -> None:
    batch_path(tmp_path, 0).parent.mkdir()
    for version in range(6):
        pq.write_table(make_batch(1, 1, PolicyStamp(version=version, digest="d" * 32)), batch_path(tmp_path, version))
    kept = Kept()
    reporter = LastSample(tmp_path, str, kept, freq=3)
    for step in range(1, 7):
        reporter.step(step, {})
    assert [version for version, _ in kept.shown] == [3, 6]
