"""Tests the service over gRPC: one in this process, and one in a process that is killed."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from lockstep.reward.v1 import environment_pb2, reward_pb2_grpc
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.types.v1 import types_pb2

from services.common.errors import InvalidInput, PreconditionFailed, Reason, Unavailable
from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.reward.errors import FailureReason
from services.reward.servicer import RewardServicer
from tests.support import LIMITS_S, PATIENCE_S, cpu_seconds, raises, until

MIXED = {"scorers": [{"kind": "math"}, {"kind": "exact", "weight": 0.5}], "num_workers": 1, "timeout_s": PATIENCE_S}
LONG = {"num_workers": 1, "timeout_s": PATIENCE_S}
HANG = r"\boxed{5^{5^{5^5}}}"


@pytest_asyncio.fixture
async def client():
    server, servicer = Server(), RewardServicer()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService"])
    client = Client(f"127.0.0.1:{port}", reward_pb2_grpc.RewardServiceStub)
    yield client
    await client.close()
    await servicer.close()
    await server.grpc.stop(0)


async def open_run(client: Client, config: dict, run_id: str = "r", **fields: str) -> pb.OpenRunResponse:
    request = pb.OpenRunRequest(run_id=run_id, config_json=json.dumps(config), **fields)
    return await client.call(RewardService.OpenRun, request, timeout_s=PATIENCE_S)


async def score(client: Client, *texts: str, answer: str = "5", **fields: object) -> pb.ScoreResponse:
    stop = types_pb2.FINISH_REASON_STOP
    candidates = [pb.Candidate(text=text, num_tokens=3, finish_reason=stop) for text in texts]
    defaults = {"run_id": "r", "prompt_id": "p", "prompt": "?", "answer": answer, "candidates": candidates}
    request = pb.ScoreRequest(**{**defaults, **fields})
    return await client.call(RewardService.Score, request, timeout_s=PATIENCE_S)


async def test_a_group_with_right_wrong_and_endless_samples(client):
    for limit_s in LIMITS_S:
        opened = await open_run(client, {**MIXED, "timeout_s": limit_s})
        response = await score(client, "5", r"\boxed{4}", HANG, r"\boxed{5}")
        if not any(s.HasField("failure") for s in response.scores):
            break
    assert re.fullmatch(r"math 9/math-verify-[0-9.]+ x 1 \+ exact 2 x 0\.5", opened.scorer)
    assert response.scorer == opened.scorer
    right, wrong, endless, boxed = response.scores
    assert [s.reward for s in (right, wrong, boxed)] == [1.5, 0.0, 1.0]
    assert dict(right.components) == {"math": 1.0, "exact": 1.0}
    assert not any(s.HasField("failure") for s in response.scores)
    assert (endless.reward, dict(endless.components)) == (0.0, {"math": 0.0, "exact": 0.0})


async def test_every_failure_reason_has_its_word_on_the_wire():
    assert {f"FAILURE_REASON_{reason}" for reason in FailureReason} == set(pb.FailureReason.keys()) - {
        "FAILURE_REASON_UNSPECIFIED"
    }


async def test_functions_of_trl_and_verl_score_one_group_together(client, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    names = {"trl_accuracy": "trl", "compute_score": "verl"}
    scorers = [{"kind": "python", "path": f"reward_functions:{path}", "name": name} for path, name in names.items()]
    await open_run(client, {"scorers": scorers, **LONG})
    row = {"solution": "4", "data_source": "openai/gsm8k", "extra_info": {"index": 7}}
    chat = [environment_pb2.Message(role="user", content="2 + 2?")]
    response = await score(client, "4", "5", answer="4", extra_json=json.dumps(row), messages=chat)
    assert [dict(one.components) for one in response.scores] == [{"trl": 1, "verl": 1}, {"trl": 0, "verl": 0}]


async def test_functions_read_the_answer_by_the_name_of_its_column(client, functions):
    names = {"trl_accuracy": "trl", "reads_solution": "lockstep"}
    scorers = [{"kind": "python", "path": f"reward_functions:{path}", "name": name} for path, name in names.items()]
    chat = [environment_pb2.Message(role="user", content="2 + 2?")]

    async def scored(answer_column: str, extra: dict) -> list[dict]:
        await open_run(client, {"scorers": scorers, **LONG}, answer_column=answer_column)
        response = await score(client, "4", "5", answer="4", extra_json=json.dumps(extra), messages=chat)
        return [dict(one.components) or one.failure.message for one in response.scores]

    assert await scored("solution", {}) == [{"trl": 1, "lockstep": 1}, {"trl": 0, "lockstep": 0}]
    assert await scored("solution", {"solution": "5"}) == [{"trl": 0, "lockstep": 0}, {"trl": 1, "lockstep": 1}]
    for other in ("answer", "gold", "reward_model.solution", ""):
        assert all("no column 'solution'" in failed for failed in await scored(other, {})), other
    response = await score(client, "4", answer="", messages=chat)  # nor has a row without an answer
    assert "no column 'solution'" in response.scores[0].failure.message


@pytest.mark.parametrize("column", ["answer", "solution"])
async def test_functions_read_an_answer_that_is_an_integer_as_one(client, functions, column):
    paths = {"trl": f"trl_integer_{column}", "lockstep": "reads_integer"}
    scorers = [
        {"kind": "python", "path": f"reward_functions:{path}", "name": name, "kwargs": {"column": column}}
        for name, path in paths.items()
    ]
    await open_run(client, {"scorers": scorers, **LONG}, answer_column=column)
    for is_integer in (True, False):
        response = await score(client, "4", "5", answer="4", answer_is_integer=is_integer, extra_json="{}")
        right = dict.fromkeys(paths, float(is_integer))
        assert [dict(one.components) for one in response.scores] == [right, dict.fromkeys(paths, 0.0)]
    with pytest.raises(InvalidInput, match="answer: with answer_is_integer, it is no integer: 'four'"):
        await score(client, "4", answer="four", answer_is_integer=True, extra_json="{}")


async def test_state_follows_the_run(client):
    async def info() -> types_pb2.ServiceInfo:
        return (await client.call(RewardService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)).info

    before = await info()
    assert (before.service, before.state, before.run_id, before.config_digest) == ("reward", "idle", "", "")
    assert set(before.libraries) == {"math-verify", "sympy"}
    with pytest.raises(PreconditionFailed) as caught:
        await score(client, "5")
    assert caught.value.reason is Reason.RUN_NOT_OPEN

    exact, gsm8k = ({"scorers": [{"kind": kind}]} for kind in ("exact", "gsm8k"))
    assert (await open_run(client, exact)).scorer == (await open_run(client, exact)).scorer == "exact 2 x 1"
    during = await info()
    assert (during.state, during.run_id, during.incarnation) == ("open", "r", before.incarnation)
    assert (await open_run(client, gsm8k)).scorer == "gsm8k 9 x 1"
    assert (await info()).config_digest != during.config_digest
    assert (await open_run(client, exact, "other")).scorer == "exact 2 x 1"
    await client.call(
        RewardService.CloseRun, pb.CloseRunRequest(run_id="r"), timeout_s=PATIENCE_S
    )  # late, of a run that was replaced
    assert (await info()).run_id == "other"
    for _ in range(2):
        await client.call(RewardService.CloseRun, pb.CloseRunRequest(run_id="other"), timeout_s=PATIENCE_S)
    assert ((await info()).state, (await info()).run_id) == ("idle", "")


async def test_bad_requests_name_the_field(client):
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG):
        await open_run(client, {"scorers": [{"kind": "no"}]})
    with raises(InvalidInput, field="run_id"):
        await open_run(client, MIXED, run_id="")
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="config_json"):
        await client.call(RewardService.OpenRun, pb.OpenRunRequest(run_id="r"), timeout_s=PATIENCE_S)
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="reward.scorers.0"):
        await open_run(client, {"scorers": [{"kind": "python", "path": "no_such:f"}]})
    await open_run(client, {"scorers": [{"kind": "exact"}]})
    for fields, name in (
        ({"candidates": []}, "candidates"),
        ({"extra_json": "{"}, "extra_json"),
        ({"extra_json": "[1]"}, "extra_json"),
        ({"extra_json": "[" * 100_000}, "extra_json"),
        ({"candidates": [pb.Candidate(text="5")]}, "candidates[0].finish_reason"),
    ):
        with raises(InvalidInput, field=name):
            await score(client, "5", **fields)


async def test_a_scorer_that_raises_leaves_its_traceback_in_the_log_once(client, functions, caplog):
    await open_run(client, {"scorers": [{"kind": "python", "path": "reward_functions:raises"}], **LONG})
    for _ in range(2):
        response = await score(client, "a", "b")
        for one in response.scores:
            assert re.fullmatch(r"KeyError: 'column' \(reward_functions\.py, line \d+\)", one.failure.message)
        assert len(response.scores) == 2
    lines = [record.getMessage() for record in caplog.records if "KeyError: 'column'" in record.getMessage()]
    assert len(lines) == 4
    assert "prompt p sample 0: scorer python: ERROR" in lines[0]
    assert "reward_functions.py" in lines[0] and 'raise KeyError("column")' in lines[0]
    assert ["Traceback" in line for line in lines] == [True, False, False, False]


async def test_a_reward_that_is_not_finite_is_a_failure_of_its_sample(client, functions):
    scorers = [
        {"kind": "python", "name": name, "path": "reward_functions:by_completion", "weight": weight}
        for name, weight in (("up", 1e10), ("down", -1e10))
    ]
    await open_run(client, {"scorers": scorers[:1], **LONG})
    fine, infinite = (await score(client, "1", "1e308")).scores
    assert (fine.reward, fine.HasField("failure")) == (1e10, False)
    assert "weighted sum of {'up': 1e+308} is inf" in infinite.failure.message
    await open_run(client, {"scorers": scorers, **LONG})
    (nan,) = (await score(client, "1e308")).scores
    assert (nan.failure.scorer, nan.reward) == ("up + down", 0.0)
    assert "is nan" in nan.failure.message


async def until_busy(workers: list[int], num_busy: int) -> list[int]:
    """Waits until so many of these idle workers use CPU time, and returns them."""
    before = {pid: cpu_seconds(pid) for pid in workers}
    busy: list[int] = []

    def enough() -> bool:
        busy[:] = [pid for pid in workers if cpu_seconds(pid) > before[pid] + 0.1]
        return len(busy) == num_busy

    await until(enough)
    return busy


async def test_a_caller_that_gives_up_ends_the_work(client, children, gone):
    before = set(children(os.getpid()))
    await open_run(client, MIXED)
    workers = list(set(children(os.getpid())) - before)
    assert len(workers) == 2  # one of them spare
    scoring = asyncio.create_task(score(client, HANG))
    busy = await until_busy(workers, 1)
    scoring.cancel()
    assert await gone(busy)
    assert (await score(client, r"\boxed{5}")).scores[0].components["math"] == 1.0


@contextlib.asynccontextmanager
async def service():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", "--listen", "127.0.0.1:0",
        stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parent,
    )  # fmt: skip
    try:
        while not (port := re.search(rb"listens on 127\.0\.0\.1:(\d+)", line := await process.stderr.readline())):
            assert line, "the service ended"
        client = Client(f"127.0.0.1:{int(port[1])}", reward_pb2_grpc.RewardServiceStub)
        yield process, client
        await client.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGKILL, -9), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.long)]
)
async def test_no_process_outlives_the_service(children, gone, number, exit_code):
    config = {
        "scorers": [{"kind": "math"}, {"kind": "python", "path": "reward_functions:hangs"}],
        **LONG,
        "timeout_s": 600,
    }
    async with service() as (process, client):
        await open_run(client, config)
        workers = children(process.pid)
        assert len(workers) == 3  # one of them spare
        scoring = asyncio.create_task(score(client, HANG))
        try:
            await until_busy(workers, 2)
            process.send_signal(number)
            assert await gone(workers)
            assert await asyncio.wait_for(process.wait(), timeout=PATIENCE_S) == exit_code
            with pytest.raises(Unavailable):
                await scoring
        finally:
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def test_a_listener_beyond_loopback_is_refused():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", "--listen", "0.0.0.0:0",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), timeout=PATIENCE_S)
    assert process.returncode == 2
    assert b"loopback" in errors
