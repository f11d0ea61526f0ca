"""Lines of logs: what they look like, and that they say what they are about, also in another process."""

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP

from services.common.errors import InvalidInput
from services.common.rpc.client import Client
from services.common.telemetry import fields, formatter, incoming, outgoing, within
from tests.common.telemetry.watched import Service, reward_service
from tests.support import PATIENCE_S


def record(message: str = "%d samples", *arguments: object, **more: object) -> logging.LogRecord:
    return logging.LogRecord(
        "a.b", logging.WARNING, "f.py", 1, message, arguments or (3,), **{"exc_info": None, **more}
    )


def test_a_line_of_json() -> None:
    with within(run="r-1", step=4, group="p\n7"):
        line = formatter("json", "reward").format(record())
    assert "\n" not in line
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "level": "WARNING",
        "service": "reward",
        "logger": "a.b",
        "message": "3 samples",
        "run": "r-1",
        "step": 4,
        "group": "p\n7",
    }


def test_an_exception_stays_on_its_line_of_json() -> None:
    try:
        raise ValueError("wrong\nvalue")
    except ValueError:
        line = formatter("json").format(record(exc_info=sys.exc_info()))
    assert "\n" not in line and "ValueError: wrong\nvalue" in json.loads(line)["exception"]


def test_a_line_of_text() -> None:
    assert formatter("text", "reward").format(record()).endswith(" W reward a.b: 3 samples")
    with within(run="r-1", step=4):
        assert formatter("text").format(record()).endswith(" W a.b: 3 samples  [run=r-1 step=4]")


def test_words_of_others_neither_act_on_a_terminal_nor_pass_for_a_record() -> None:
    line = formatter("text").format(record("%s", "\x1b]0;x\x07 \x9b2J \u202eevil\r\n2026-01-01 00:00:00 W a.b: forged"))
    assert line.endswith("\ufffd]0;x\ufffd \ufffd2J \ufffdevil\ufffd\n  2026-01-01 00:00:00 W a.b: forged")


async def test_work_belongs_to_what_is_around_it() -> None:
    async def group(name: str) -> dict[str, object]:
        with within(group=name):
            await asyncio.sleep(0)
            return dict(fields())

    with within(run="r", step=1):
        told = await asyncio.gather(group("a"), group("b"))
        assert told == [{"run": "r", "step": 1, "group": name} for name in "ab"]
    assert fields() == {}


@pytest.mark.parametrize(
    ("baggage", "known"),
    [
        ("run=r,step=3,group=a%2Cb%3D1", {"run": "r", "step": 3, "group": "a,b=1"}),
        ("step=three,run=r", {"run": "r"}),
        ("run=a%0Aforged line", {}),
        (f"run={'x' * 200}", {}),
        ("run = r ; secret=1 , other=7,", {"run": "r"}),
        ("", {}),
        ("=,;,%", {}),
    ],
)
def test_only_what_is_fit_for_a_log_comes_in(baggage: str, known: dict[str, object]) -> None:
    with incoming([("baggage", baggage), ("user-agent", "x")]):
        assert fields() == known


def test_what_goes_out_comes_in() -> None:
    with within(run="Lauf ä", step=0, group='p "1", 2%'):
        sent, told = outgoing(), fields()
    assert all(value.isascii() for _, value in sent)
    with incoming(sent):
        assert fields() == told
    assert outgoing() == ()
    with within(group="名" * 100_000):  # metadata that is too large would fail the call
        assert len(outgoing()[0][1]) < 2000


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "number.py").write_text("def score(*, completion, **_):\n    return float(completion)\n")
    with reward_service("--log-format", "json", cwd=tmp_path) as started:
        yield started


async def test_lines_of_a_service_are_about_the_callers_work(service: Service) -> None:
    client = Client(service.until(r"listens on ([\d.:]+)")[1], reward_pb2_grpc.RewardServiceStub)
    scorers = '{"scorers": [{"kind": "python", "path": "number:score"}], "num_workers": 1}'
    candidates = [pb.Candidate(text=text, finish_reason=FINISH_REASON_STOP) for text in ("1", "x")]
    with within(run="r-1"):
        await client.call(
            RewardService.OpenRun, pb.OpenRunRequest(run_id="r-1", config_json=scorers), timeout_s=PATIENCE_S
        )
        with within(step=5, group="p7"):
            request = pb.ScoreRequest(run_id="r-1", prompt_id="p7", candidates=candidates)
            await client.call(RewardService.Score, request, timeout_s=PATIENCE_S)
        with pytest.raises(InvalidInput), within(step=6):
            await client.call(RewardService.Score, pb.ScoreRequest(run_id="r-1"), timeout_s=PATIENCE_S)
    await client.close()
    lines = [json.loads(line) for line in service.end()]
    told = [{name: line.get(name) for name in ("run", "step", "group", "sample")} for line in lines]
    assert told == [
        {"run": None, "step": None, "group": None, "sample": None},
        {"run": "r-1", "step": None, "group": None, "sample": None},  # how the function is called
        {"run": "r-1", "step": None, "group": None, "sample": None},  # the scorers have started
        {"run": "r-1", "step": None, "group": None, "sample": None},
        {"run": "r-1", "step": 5, "group": "p7", "sample": 1},
        {"run": "r-1", "step": 6, "group": None, "sample": None},
    ]
    assert {line["service"] for line in lines} == {"reward"}
    assert "could not convert" in lines[4]["message"] and "INVALID_INPUT" in lines[5]["message"]
