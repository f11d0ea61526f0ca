"""The calls of an agent that failed, as people read them: each shows what it adds to the call that it continues."""

import pytest
from lockstep.reward.v1.agent_pb2 import AgentCall

from services.coordinator.data.calls import CallLog


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ([["a"], ["a", "0", "b"]], [(None, ["a"]), (0, ["b"])]),
        ([["a"], ["b"], ["a", "0", "c"], ["b", "1", "d"]], [(None, ["a"]), (None, ["b"]), (0, ["c"]), (1, ["d"])]),
        ([["a"], ["a", "0", "b"], ["a", "0", "c"]], [(None, ["a"]), (0, ["b"]), (0, ["c"])]),
        ([["a"], ["a"], ["a", "1", "b"]], [(None, ["a"]), (0, []), (1, ["b"])]),
        ([["a"], ["a", "other", "b"]], [(None, ["a"]), (0, ["other", "b"])]),  # the agent changed the answer
        ([["a", "b"], ["a", "c"]], [(None, ["a", "b"]), (None, ["a", "c"])]),
    ],
    ids=["one conversation", "two in turns", "a branch", "again", "another answer", "the same first message"],
)
def test_a_call_shows_what_it_adds(asked: list[list[str]], shown: list[tuple[int | None, list[str]]]) -> None:
    log = CallLog()
    for number, messages in enumerate(asked):
        entry = log.ask(AgentCall(number=number), {"max_tokens": 1})
        log.keep(entry, {"messages": messages, "tools": [], "stop": []})
        log.answer(entry, str(number), "stop")  # type: ignore[arg-type] # a message is JSON
    assert [(line["continues"], line["messages"]) for line in log.lines()] == shown
    assert [line["answer"] for line in log.lines()] == [str(number) for number in range(len(asked))]
