"""Tests traces and Prometheus metrics of a run, with the loop in this process and the reward service in another."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp

from services.common import telemetry as otel_module
from services.common.errors import InvalidInput, Unavailable
from services.common.telemetry import Otel, Trace
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.data.groups import to_table
from services.coordinator.fleet import launch
from services.coordinator.fleet.launch import TARGETS, ServiceFlags
from services.coordinator.observe.reporters import watchers
from services.coordinator.rl.metrics import step_metrics
from services.coordinator.rl.sampling.collect import Collector
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from tests.common.telemetry.watched import Span, otlp_collector, reward_service, scrape, value
from tests.coordinator.fake_services import TOKENIZER, FakeReplica, make_config, make_prompt, replicas
from tests.support import free_port, raises

PROMPTS = [make_prompt(index) for index in range(3)]


@contextlib.contextmanager
def opened(directory: Path, **observability: object):
    config = make_config(name="run", runs_dir=directory, observability=observability)
    run = Run(config, open_run(config))
    try:
        run.reporters.add(watchers(run))
        run.begin(0, ())
        yield run
    finally:
        run.close()


@contextlib.asynccontextmanager
async def collecting(
    run: Run, fakes: list[FakeReplica], reward_address: str
) -> AsyncIterator[tuple[Collector, Rollout]]:
    rollout, reward = Rollout([fake.address for fake in fakes], run.config), Rewards([reward_address], run.config)
    try:
        run.reporters.tell(lambda reporter: reporter.watch(rollout))
        await rollout.open(run.run_id, ModelCard())
        await reward.open(run.run_id)
        yield Collector(rollout, reward, TOKENIZER, 0), rollout  # type: ignore[arg-type]
    finally:
        await rollout.close()
        await reward.close()


async def steps(run: Run, collector: Collector, rollout: Rollout, num_steps: int) -> None:
    """Runs steps of the loop without training."""
    for version in range(num_steps):
        stamp = PolicyStamp(version=version, digest=f"digest {version}")
        with run.phase(Phase.PUBLISHING):
            for replica in rollout.replicas:
                await replica.commit(stamp)
        with run.phase(Phase.GENERATING):
            groups = await collector.collect("math", PROMPTS, 2, run.config.rollout.sampling, stamp)
        run.finish_step(version + 1, step_metrics(run, {}, to_table(groups)))


async def test_a_step_is_one_trace_over_all_processes(tmp_path: Path) -> None:
    with otlp_collector() as (collector, url), reward_service("--otel", url) as service:
        address = service.until(r"listens on ([\d.:]+)")[1]
        with opened(tmp_path, otel_endpoint=url) as run:
            async with replicas(1) as fakes, collecting(run, fakes, address) as (collects, rollout):
                await steps(run, collects, rollout, 2)
        service.end()  # it sends the remaining spans
    spans = {span.id: span for span in collector.spans}

    def path(span: Span) -> list[str]:
        return [*(path(spans[span.parent]) if span.parent else []), f"{span.process.partition('-')[2]}:{span.name}"]

    scores = [span for span in collector.spans if span.name == "Score"]
    assert len(scores) == 2 * len(PROMPTS)
    for span in scores:
        assert path(span) == ["coordinator:step", "coordinator:generating", "coordinator:group", "reward:Score"]
    roots = [span for span in collector.spans if span.name == "step"]
    assert [span.attributes["version"] for span in roots] == [0, 1]
    assert len({span.trace for span in roots}) == 2
    for root in roots:
        inside = sorted(f"{span.process}:{span.name}" for span in collector.spans if span.trace == root.trace)
        calls = ["lockstep-reward:Score"] * 3
        phases = ["lockstep-coordinator:generating", *["lockstep-coordinator:group"] * 3]
        assert inside == [*phases, "lockstep-coordinator:publishing", "lockstep-coordinator:step", *calls]
    groups = [span.attributes for span in collector.spans if span.name == "group"]
    assert sorted(group["group"] for group in groups) == sorted([prompt.prompt_id for prompt in PROMPTS] * 2)
    assert not any(span.is_error for span in collector.spans)
    (opening,) = [span for span in collector.spans if span.name == "OpenRun"]
    assert opening.parent == ""  # no step had begun


def test_a_span_that_failed_says_so() -> None:
    with otlp_collector() as (collector, url):
        otel = Otel(url, "x", "1", field="--otel")
        trace = Trace("", "x", otel)
        with pytest.raises(Unavailable), trace.span("outer"), trace.span("inner", number=3, other=[1]):
            raise Unavailable("gone")
        otel.close()
    inner, outer = collector.spans
    assert (inner.parent, inner.attributes) == (outer.id, {"number": 3, "other": "[1]"})
    assert inner.is_error and outer.is_error


def test_a_collector_that_is_not_there_is_one_warning_and_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert otel_module._TIMEOUT_S < launch._GRACE_S - 1  # after which a service is killed that was asked to end
    monkeypatch.setattr(otel_module, "_TIMEOUT_S", 0.2)  # gRPC's exporter would take 7 s if it were not told
    url = f"http://127.0.0.1:{free_port()}"
    otel = Otel(url, "x", "1", field="--otel")
    for _ in range(3):
        with Trace("", "x", otel).span("lost"):
            pass
        otel._provider.force_flush()
    begin = time.monotonic()
    otel.close()
    assert time.monotonic() - begin < 5
    (warning,) = caplog.records
    assert (warning.levelname, "spans cannot be sent" in warning.getMessage()) == ("WARNING", True)


@pytest.mark.parametrize("url", ["127.0.0.1:4317", "grpc://host:4317", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with raises(InvalidInput, field="--otel"):
        Otel(url, "x", "1", field="--otel")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidInput, match=r"observability\.otel_endpoint.*pip install 'lockstep-rl\[otel\]'"):
        Otel("http://127.0.0.1:4317", "x", "1", field="observability.otel_endpoint")


async def test_prometheus_reads_how_a_run_goes(tmp_path: Path) -> None:
    page = f"127.0.0.1:{free_port()}"
    with reward_service() as service, opened(tmp_path, metrics_address=page) as run:
        address = service.until(r"listens on ([\d.:]+)")[1]
        async with replicas(2) as fakes, collecting(run, fakes, address) as (collects, rollout):
            await steps(run, collects, rollout, 2)
            run.finish_evaluation(1, {"eval/test/reward": 0.5, "eval/test/failed": 1.0})
            run.finish_evaluation(2, {"eval/test/reward": 0.75})
            await fakes[0].die()
            rollout.mark_dead(rollout.replicas[0], Unavailable("gone"))
            rollout.num_redispatched = 3
            metrics = await asyncio.to_thread(scrape, page)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["observability"]["metrics_address"] == page
    assert value(metrics, "lockstep_coordinator_run_info", run_id=run.run_id) == 1
    assert value(metrics, "lockstep_coordinator_step") == 2
    assert value(metrics, "lockstep_coordinator_phase_seconds_count", phase="generating") == 2
    assert value(metrics, "lockstep_coordinator_phase_seconds_sum", phase="publishing") > 0
    assert value(metrics, "lockstep_coordinator_step_seconds") > 0
    assert value(metrics, "lockstep_coordinator_batch_tokens_total") == 2 * 3 * 2 * 2  # steps, groups, samples, tokens
    assert value(metrics, "lockstep_coordinator_reward_mean") == 0  # all numbers from the replicas are wrong
    assert value(metrics, "lockstep_coordinator_number", name="batch/samples") == 6
    assert value(metrics, "lockstep_coordinator_number", name="eval/test/reward") == 0.75
    assert "eval/test/failed" not in str(metrics)  # only the evaluation before had a sample without a score
    assert value(metrics, "lockstep_coordinator_dead_replicas") == 1
    assert value(metrics, "lockstep_coordinator_redispatched_groups_total") == 3
    with opened(tmp_path, metrics_address=page) as run:  # the next session
        run.version = 2
        with run.phase(Phase.GENERATING):
            metrics = await asyncio.to_thread(scrape, page)
    assert value(metrics, "lockstep_coordinator_step") == 2
    assert "reward_mean" not in str(metrics) and "step_seconds" not in str(metrics)  # it has no step yet


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics_address": "0.0.0.0:9100"}, r"observability\.metrics_address 0\.0\.0\.0.*metrics_insecure=true"),
        ({"metrics_address": "9100"}, r"observability\.metrics_address: '9100' is not HOST:PORT"),
        ({"otel_endpoint": "localhost"}, r"observability\.otel_endpoint: 'localhost' is not http"),
    ],
)
def test_what_cannot_be_watched_is_an_error_at_once(tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message), opened(tmp_path, **settings):
        pass


def test_a_tracker_that_does_not_open_leaves_the_metrics_address_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = f"127.0.0.1:{free_port()}"
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        raises(InvalidInput, field="observability.trackers"),
        opened(tmp_path, metrics_address=page, trackers=[{"kind": "wandb"}]),
    ):
        pass
    with opened(tmp_path, metrics_address=page):
        assert value(scrape(page), "lockstep_coordinator_step") == 0


def test_started_services_are_watched_too(
    tmp_path: Path, make_flags: Callable[..., ServiceFlags], caplog: pytest.LogCaptureFixture
) -> None:
    flags = make_flags(metrics_address="127.0.0.1:9100", otel_endpoint="http://c:4317", log_format="json")
    reward, rollout = flags.of("reward"), flags.of("rollout-0")
    assert reward[0] == "--metrics" and reward[2:] == ["--otel", "http://c:4317", "--log-format", "json"]
    flags.write_targets()
    targets = json.loads((tmp_path / "run" / TARGETS).read_text())
    assert [target["targets"] for target in targets] == [[reward[1]], [rollout[1]], ["127.0.0.1:9100"]]
    assert [target["labels"]["lockstep_process"] for target in targets] == ["reward", "rollout-0", "coordinator"]
    assert {target["labels"]["job"] for target in targets} == {"run"}
    flags.remove_targets()
    (tmp_path / "run" / TARGETS).mkdir()  # it cannot be deleted, as on a read-only disk: the run ends as it would
    flags.remove_targets()
    assert f"{TARGETS} is of a run that has ended, and cannot be deleted" in caplog.text
    (tmp_path / "run" / TARGETS).rmdir()
    make_flags().write_targets()
    assert make_flags().of("reward") == ["--log-format", "text"] and not (tmp_path / "run" / TARGETS).exists()


@pytest.fixture
def make_flags(tmp_path: Path) -> Callable[..., ServiceFlags]:
    def make(**settings: object) -> ServiceFlags:
        return ServiceFlags(make_config(name="run", runs_dir=tmp_path, observability=settings), "127.0.0.1", ports)

    (tmp_path / "run").mkdir()
    with contextlib.ExitStack() as ports:
        yield make
