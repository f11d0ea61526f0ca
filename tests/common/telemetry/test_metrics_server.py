"""Tests the metrics that Prometheus reads from a real service, and who may read them."""

import asyncio
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path

import pytest
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP
from prometheus_client import CollectorRegistry

from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.rpc.client import Client
from services.common.rpc.server import Metrics, Page, PageHandler, RpcMetrics
from services.common.telemetry import Span
from tests.common.telemetry.watched import Service, reward_service, scrape, value
from tests.support import PATIENCE_S, raises

FAILING = "def score(*, completion, **_):\n    return float(completion)\n"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "number.py").write_text(FAILING)
    with reward_service("--metrics", "127.0.0.1:0", cwd=tmp_path) as started:
        yield started


async def test_a_reward_service_says_what_it_has_done(service: Service) -> None:
    page = service.until(r"metrics on http://([\d.:]+)/metrics")[1]
    client = Client(service.until(r"listens on ([\d.:]+)")[1], reward_pb2_grpc.RewardServiceStub)
    scorers = '{"scorers": [{"kind": "exact"}, {"kind": "python", "path": "number:score"}], "num_workers": 1}'
    candidates = [pb.Candidate(text=text, finish_reason=FINISH_REASON_STOP) for text in ("1", "2", "x")]
    request = pb.ScoreRequest(run_id="r", prompt_id="p", answer="1", candidates=candidates)
    with pytest.raises(PreconditionFailed):
        await client.call(RewardService.Score, request, timeout_s=PATIENCE_S)
    begin = time.monotonic()
    await client.call(RewardService.OpenRun, pb.OpenRunRequest(run_id="r", config_json=scorers), timeout_s=PATIENCE_S)
    opened_s = time.monotonic() - begin
    for _ in range(2):
        await client.call(RewardService.Score, request, timeout_s=PATIENCE_S)
    await client.close()

    metrics = await asyncio.to_thread(scrape, page)
    info = dict(next(iter(metrics["lockstep_service_info"])))
    assert (info["service"], info["version"], len(info["incarnation"])) == ("reward", version("lockstep-rl"), 32)
    assert value(metrics, "lockstep_rpc_started_total", method="Score") == 3
    assert value(metrics, "lockstep_rpc_finished_total", method="Score", code="OK") == 2
    assert value(metrics, "lockstep_rpc_finished_total", method="Score", code="FAILED_PRECONDITION") == 1
    assert value(metrics, "lockstep_rpc_failures_total", method="Score", reason="RUN_NOT_OPEN") == 1
    assert value(metrics, "lockstep_rpc_seconds_count", method="Score") == 3
    assert 0 < value(metrics, "lockstep_rpc_seconds_sum", method="OpenRun") < opened_s
    num_scores = {tuple(sorted(labels)): count for labels, count in metrics["lockstep_reward_scores_total"].items()}
    assert num_scores == {
        (("outcome", "scored"), ("scorer", "exact")): 6,
        (("outcome", "scored"), ("scorer", "python")): 4,
        (("outcome", "error"), ("scorer", "python")): 2,
    }
    assert value(metrics, "lockstep_reward_queue_samples") == 0
    assert value(metrics, "process_resident_memory_bytes") > 1 << 20
    assert not [name for name in metrics if name.endswith("_created")]


def test_the_page_is_off_unless_asked_for() -> None:
    metrics = Metrics("x")
    assert metrics.serve() == 0
    metrics.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_a_page_beyond_loopback_is_refused(host: str) -> None:
    with raises(InvalidInput, field="metrics"):
        Metrics("x", Page(f"{host}:0"))
    with raises(InvalidInput, field="--metrics"):
        Metrics("x", Page("9100"))


def test_a_page_beyond_loopback_is_served_when_asked_for() -> None:
    metrics = Metrics("x", Page("0.0.0.0:0", insecure=True))
    port = metrics.serve()
    assert "lockstep_service_info" in scrape(f"127.0.0.1:{port}")
    with raises(InvalidInput, field="--metrics"):
        Metrics("y", Page(f"127.0.0.1:{port}")).serve()
    metrics.close()
    with pytest.raises(urllib.error.URLError):
        scrape(f"127.0.0.1:{port}")


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_idle_connections_take_few_threads_and_keep_nobody_out() -> None:
    metrics = Metrics("x", Page("127.0.0.1:0"))
    with closing(metrics), ExitStack() as opened:
        port = metrics.serve()
        address = f"127.0.0.1:{port}"
        before = threads(os.getpid())
        idle = [opened.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) for _ in range(300)]
        assert "lockstep_service_info" in scrape(address)
        for connection in idle[:200]:  # only the newest are kept
            assert closed(connection)
        assert threads(os.getpid()) < before + 100
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(urllib.request.Request(f"http://{address}/", method="HEAD"), timeout=PATIENCE_S)


def closed(connection: socket.socket) -> bool:
    """Waits for the other end to close it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_whoever_sends_no_request_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageHandler, "timeout", 0.2)
    metrics = Metrics("x", Page("127.0.0.1:0"))
    with closing(metrics), socket.create_connection(("127.0.0.1", metrics.serve()), PATIENCE_S) as slow:
        slow.send(b"GET /metrics HTTP/1.1\r\n")
        assert closed(slow)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_page_on_loopback_answers_to_no_name_of_another_host(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "GPU-7")  # a browser asks for it in small letters
    metrics = Metrics("x", Page(f"{host}:0"))
    with closing(metrics):
        port = metrics.serve()
        for name in (f"localhost:{port}", "localhost", f"127.0.0.1:{port}", "[::1]", f"[::1]:{port}", "gpu-7"):
            assert "lockstep_service_info" in asked_as(name, f"{host}:{port}")
        for name in ("rebound.example", f"rebound.example:{port}", "localhost.example"):
            with pytest.raises(urllib.error.HTTPError, match="421"):
                asked_as(name, f"{host}:{port}")


def test_a_page_for_other_hosts_answers_to_their_names_for_it() -> None:
    metrics = Metrics("x", Page("0.0.0.0:0", insecure=True))
    with closing(metrics):
        assert "lockstep_service_info" in asked_as("gpu-7.example", f"127.0.0.1:{metrics.serve()}")


def asked_as(name: str, address: str) -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Host": name})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    first, second = Metrics("a"), Metrics("b")
    with RpcMetrics(first.registry).call(Span("Score")):
        pass
    RpcMetrics(second.registry)
    assert first.registry.get_sample_value("lockstep_rpc_started_total", {"method": "Score"}) == 1
    assert second.registry.get_sample_value("lockstep_rpc_started_total", {"method": "Score"}) is None


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (InvalidInput("x"), "INVALID_ARGUMENT", "INVALID_INPUT"),
        (PreconditionFailed("x", reason=Reason.STALE_STAMP), "FAILED_PRECONDITION", "STALE_STAMP"),
        (ZeroDivisionError(), "INTERNAL", "INTERNAL"),
        (asyncio.CancelledError(), "CANCELLED", None),
    ],
)
def test_every_end_of_a_call_has_its_code(error: BaseException, code: str, reason: str | None) -> None:
    registry = CollectorRegistry()
    metrics = RpcMetrics(registry)
    with pytest.raises(type(error)), metrics.call(Span("Train")):
        raise error
    assert registry.get_sample_value("lockstep_rpc_finished_total", {"method": "Train", "code": code}) == 1
    failures = [s.labels["reason"] for m in registry.collect() for s in m.samples if "failures" in s.name]
    assert failures == ([reason] if reason else [])
