"""Measures publishing weights to running vLLM engines with the real services: seconds of each phase, and GB/s.

Run `python -m benchmarks.sync NAME SHAPE [key=value ...]`, where SHAPE is one of benchmarks.megatron_layouts.MODELS.
Weights are random. The config is the quickstart's, changed by the overrides: strategy, ranks, replicas, engine
arguments. Hashing overlaps with the transfer, so its cost is the difference from a run with `--without-digest`.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from lockstep.rollout.v1 import rollout_pb2
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.trainer.v1 import trainer_pb2
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from rich.console import Console

from benchmarks.publishing import open_publisher
from benchmarks.random_model import add_options, make_random_model
from benchmarks.report import keep
from services.common.config.load import load
from services.common.config.run import Config
from services.common.tasks import gather
from services.common.weights.plan import Plan
from services.coordinator.clients.rollout import Rollout
from services.coordinator.clients.trainer import Trainer
from services.coordinator.fleet.launch import Addresses, launch

_CONFIG = "deploy/runs/quickstart.yaml"
_WITHOUT_DIGEST = Path(__file__).parent / "without_digest"
# The engine records its reload in the first publication and checks it in the second. Later ones are direct copies.
_WARM_UP, _REPEATS = 3, 20
_NOTHING_S = 1e-3
_LINK_GB_PER_S = 450  # NVLink of an H100 or H200, per direction


async def measure(config: Config, idle_s: float) -> dict[str, list[float]]:
    """Publishes repeatedly, pausing `idle_s` before each time; returns the raw seconds of each phase."""
    samples: dict[str, list[float]] = defaultdict(list)
    async with launch(config, Addresses(reward=("127.0.0.1:1",))) as fleet:
        trainer, rollout = Trainer(fleet.addresses.trainer, config), Rollout(fleet.addresses.rollout, config)
        publisher, version = await open_publisher(trainer, rollout, config, "sync")
        begin = time.perf_counter()
        await publisher.publish(version)
        samples["first publication, with joining [s]"].append(time.perf_counter() - begin)
        largest = max(bucket.num_bytes for bucket in Plan(trainer.opened.plan).buckets)
        for _ in range(_WARM_UP - 1 + _REPEATS):
            await asyncio.sleep(idle_s)
            timed = await _publish(trainer, rollout, version, largest)
            for name, seconds in timed.items():
                samples[name].append(seconds)
        await gather([trainer.close(), rollout.close()])
    for name in samples:
        if "first" not in name:
            samples[name] = samples[name][_WARM_UP - 1 :]
    return samples


async def _publish(trainer: Trainer, rollout: Rollout, version: int, largest: int) -> dict[str, float]:
    """Publishes once as `Publisher` does; returns what each end reports. `largest` is the size of a bucket in bytes."""
    begin = time.perf_counter()
    to_send = trainer_pb2.SendWeightsRequest(epoch=1, version=version)
    to_receive = rollout_pb2.ReceiveWeightsRequest(epoch=1, version=version)
    sent, received = await asyncio.gather(
        trainer._client.call(TrainerService.SendWeights, to_send, timeout_s=120),
        gather(
            replica._client.call(RolloutService.ReceiveWeights, to_receive, timeout_s=120)
            for replica in rollout.replicas
        ),
    )
    assert {answer.digest for answer in received} == {sent.stamp.digest}
    moved = time.perf_counter()
    await gather(replica.commit(sent.stamp) for replica in rollout.replicas)
    end = time.perf_counter()
    per_s = sent.num_bytes / 1e9 / (end - begin)
    hashing_s = max(part.cost.digest_s for part in (sent, *received))
    return {
        "publication [s]": end - begin,
        "send and receive, with pausing [s]": moved - begin,
        "commit [s]": end - moved,
        "sender [s]": sent.duration_s,
        "receiver [s]": max(answer.duration_s for answer in received),
        "receiver waiting for bytes [s]": max(answer.wait_s for answer in received),
        "GB/s per receiver": per_s,
        "GB/s per receiver [share of 450]": per_s / _LINK_GB_PER_S,
        "hashing, slower end [s]": hashing_s,
        "hashing, slower end [share of publication]": hashing_s / (end - begin),
        "sender's extra memory [largest buckets]": sent.cost.extra_bytes / largest,
        "receiver's extra memory [largest buckets]": max(part.cost.extra_bytes for part in received) / largest,
    }


def main() -> None:
    """Makes the model, measures, and saves the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync")
    parser.add_argument("name")
    parser.add_argument("shape")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    add_options(parser)
    parser.add_argument("--without-digest", action="store_true", help="turn off hashing at both ends")
    parser.add_argument(
        "--idle-s",
        type=float,
        default=0.0,
        help="seconds that the engines are idle before each publication, as in a step",
    )
    options = parser.parse_intermixed_args()
    name, overrides = options.name, options.overrides
    with tempfile.TemporaryDirectory() as directory:
        model = make_random_model(Path(directory), options.shape, options)
        if options.without_digest:
            os.environ["PYTHONPATH"] = f"{_WITHOUT_DIGEST}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        fixed = [f"model={model}", f"runs_dir={directory}/runs", "name=sync", "weights.timeout_s=60"]
        config = load(Config, [_CONFIG, *fixed, *overrides])
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "logs").mkdir()
        try:
            samples = asyncio.run(measure(config, options.idle_s))
        except Exception:
            for log in (config.run_dir / "logs").glob("*.log"):
                Console().print(log.name, log.read_text(errors="replace")[-3000:], markup=False)
            raise
    if options.without_digest and (spent_s := max(samples["hashing, slower end [s]"])) > _NOTHING_S:
        raise RuntimeError(f"hashing took {spent_s} s, although it was turned off")
    worst = max(samples["publication [s]"])
    samples["publication, slowest [s]"] = [worst]
    libraries = ("torch", "vllm", "transformers")
    median = statistics.median(samples["publication [s]"])
    Console().print(f"{name}: median {median * 1e3:.1f} ms, slowest {worst * 1e3:.1f} ms")
    keep(name, samples, libraries=libraries, shape=options.shape, weights="random", config=_CONFIG, overrides=overrides)


if __name__ == "__main__":
    main()
