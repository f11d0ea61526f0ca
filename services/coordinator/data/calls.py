"""Records what agents asked and left behind: a table beside a batch, with a row for each episode.

An agent sends its whole conversation with each call, so equal messages are kept once for each episode.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
from lockstep.reward.v1.agent_pb2 import AgentCall

from services.common.json_values import JsonMapping, JsonObject

_MOST = 2**31 - 1
COUNTED = "counted"
"""Status of a call that only counts the tokens of a prompt."""
_CALL = pa.struct(
    [
        pa.field("number", pa.int32()),
        # Number of the call whose tokens the prompt begins with; null if there is none.
        pa.field("parent", pa.int32()),
        pa.field("sha256", pa.string()),  # of the request's body
        # Places in `texts`: the messages of the request, its list of tools, and the message that answers it. A call
        # that is refused or only counted has none.
        pa.field("messages", pa.list_(pa.int32())),
        pa.field("tools", pa.int32()),
        pa.field("answer", pa.int32()),
        pa.field("max_tokens", pa.int32()),
        pa.field("stop", pa.list_(pa.string())),
        # Why the answer ended (stop, length, tool_calls), "counted", or the kind of a refusal.
        pa.field("status", pa.string()),
        # How many calls were answered before this one was mapped to tokens, and before its own answer.
        pa.field("after", pa.int32()),
        pa.field("answered", pa.int32()),
    ]
)
EPISODE_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        # What the scorers got.
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("exit_code", pa.int32(), nullable=False),
        pa.field("files", pa.map_(pa.string(), pa.large_binary()), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),  # that were sampled
        pa.field("texts", pa.list_(pa.large_string()), nullable=False),  # JSON
        pa.field("calls", pa.list_(_CALL), nullable=False),  # in the order in which they came
    ]
)


@dataclass
class CallLog:
    """The calls of an episode, in the order in which they came."""

    calls: list[JsonObject] = field(default_factory=list)
    num_answered: int = 0
    _places: dict[str, int] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        return list(self._places)

    def ask(self, asked: AgentCall, said: JsonMapping) -> JsonObject:
        """Adds a call, whose request without dialect (reward/agents/dialect.py) is `said`.

        Returns its entry, which gets the other fields of a recorded call.
        """
        most = min(said["max_tokens"], _MOST)  # an agent may ask for any number
        entry = {"number": asked.number, "sha256": asked.body_sha256, "messages": [], "max_tokens": most, "stop": []}
        self.calls.append(entry)
        return entry

    def keep(self, entry: JsonObject, said: JsonMapping) -> None:
        """Adds the texts of a call. One that is not answered has none, as no limit of the episode counts them all."""
        messages, tools = list(map(self._index_of, said["messages"])), self._index_of(said["tools"])
        entry |= {"messages": messages, "tools": tools, "stop": said["stop"]}

    def answer(self, entry: JsonObject, message: JsonMapping, finish_reason: str) -> None:
        entry |= {"answer": self._index_of(message), "status": finish_reason, "answered": self.num_answered}
        self.num_answered += 1

    def lines(self) -> Iterator[JsonObject]:
        """Yields the calls for people to read, each with the messages that it adds to the call that it continues."""
        texts = list(map(json.loads, self.texts))
        tree: dict[tuple[int, int], int] = {}
        """Place in the tree of all conversations, and a message -> the place behind it."""
        ends: dict[int, int] = {}
        """Place -> the newest call of which the conversation ends there, with its answer or without."""
        for call in self.calls:
            at, num_before, before = 0, 0, None
            for index, message in enumerate(call["messages"], 1):
                at = tree.setdefault((at, message), len(tree) + 1)
                if at in ends:
                    num_before, before = index, ends[at]
            ends[at] = call["number"]
            line = {"call": call["number"], "continues": before, "status": call.get("status", "not answered")}
            line["messages"] = [texts[message] for message in call["messages"][num_before:]]
            if (answer := call.get("answer")) is not None:
                ends[tree.setdefault((at, answer), len(tree) + 1)] = call["number"]
                line["answer"] = texts[answer]
            yield line

    def _index_of(self, value: object) -> int:
        return self._places.setdefault(json.dumps(value), len(self._places))


@dataclass(frozen=True)
class Left:
    """What an agent left behind at the end of an episode, for the scorers, and its calls, for the record."""

    text: str
    exit_code: int
    files: Mapping[str, bytes]
    num_tokens: int
    """Number of tokens that the policy sampled."""
    log: CallLog = field(default_factory=CallLog)

    def row(self, prompt_id: str, group: int, sample: int) -> dict[str, object]:
        """Returns the episode as a row of EPISODE_SCHEMA."""
        left = {"text": self.text, "exit_code": self.exit_code, "files": list(self.files.items())}
        calls = {"num_tokens": self.num_tokens, "texts": self.log.texts, "calls": self.log.calls}
        return {"prompt_id": prompt_id, "group": group, "sample": sample, **left, **calls}

    @classmethod
    def of(cls, row: JsonMapping) -> "Left":
        """Returns what the agent of a row of EPISODE_SCHEMA left behind, without its calls."""
        return cls(row["text"], row["exit_code"], dict(row["files"]), row["num_tokens"])


def requests_of(episode: JsonMapping) -> Iterator[tuple[JsonMapping, JsonMapping]]:
    """Yields the calls of a row of EPISODE_SCHEMA that have a request, each with it."""
    texts = list(map(json.loads, episode["texts"]))
    for call in episode["calls"]:
        if call["tools"] is None:
            continue
        messages = [texts[place] for place in call["messages"]]
        yield call, {**call, "messages": messages, "tools": texts[call["tools"]]}
