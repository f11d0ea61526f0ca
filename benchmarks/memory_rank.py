"""Measures the peak memory of one trainer rank on CPU in each phase. `benchmarks.memory` starts it, a case a time.

A phase is: forward (log-probabilities only), backward (forward and backward of an update), optimizer (the rest of the
update) and publication. The peak is VmHWM of /proc/self/status, which is reset before each phase.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from lockstep.types.v1.types_pb2 import WeightGroup
from torch.distributed.rendezvous import rendezvous

from benchmarks.train_cases import make_samples
from benchmarks.updating import part_of, update
from services.common.config.trainer import TrainerConfig
from services.common.families.architecture import read_architecture
from services.common.weights.store import ServedStore
from services.trainer.backend import Role
from services.trainer.command import run_ranks
from services.trainer.ranks.worker import Worker
from services.trainer.samples import forward_parts

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # of clear_refs, proc_pid_clear_refs(5)


def main() -> None:
    """Runs the ranks of the case in `argv[1]`, a directory with model/ and case.json; writes rank-N.json there."""
    directory = Path(sys.argv[1])
    case = json.loads((directory / "case.json").read_text())
    sys.exit(run_ranks(case["trainer"]["num_ranks"], functools.partial(_serve, directory, case)))


def _serve(directory: Path, case: dict[str, Any]) -> None:
    store, rank, world = next(rendezvous("env://"))
    torch.set_num_threads(1)
    measured = Rank(directory, case, store, rank, world).run()
    (directory / f"rank-{rank}.json").write_text(json.dumps(measured))
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{other}" for other in range(world)])  # when one rank ends, the launcher ends the others
    os._exit(0)


class Rank:
    """Runs one rank's phases and keeps their peaks."""

    def __init__(self, directory: Path, case: dict[str, Any], store: dist.Store, rank: int, world: int):
        self._worker = Worker(store, rank, world, torch.device("cpu"))
        self._store, self._rank, self._model = store, rank, directory / "model"
        self._config, self._case = TrainerConfig(**case["trainer"]).for_steps(None), case
        self._peaks: dict[str, list[int]] = {}

    def run(self) -> dict[str, list[int]]:
        """Returns the peaks of each phase in bytes. The first update also allocates the optimizer's state."""
        self._peaks["imports"] = [_resident()]
        with self.phase("open"):
            answer = self._worker.open(
                role=Role.POLICY,
                config_json=self._config.model_dump_json(),
                model_path=str(self._model),
                checkpoint_path="",
                seed=0,
                bucket_bytes=self._case["bucket_bytes"],
            )
        data_rank = answer.body["data_rank"]
        forward, train = self._parts(data_rank, self._case["data_ranks"])
        with self._split_updates():
            for repeat in range(self._case["repeats"]):
                with self.phase("forward"):
                    self._worker.forward(role=Role.POLICY, **forward.body, frames=forward.frames, temperature=1.0)
                update(self._worker, train, version=repeat)
                with self.phase("publication"):
                    self._publish(epoch=repeat)
        return self._peaks

    def _parts(self, data_rank: int, data_ranks: int) -> Any:
        prompt, completion = self._case["prompt_tokens"], self._case["completion_tokens"]
        lengths = np.array([[prompt, completion]] * self._case["samples"])
        samples = make_samples(lengths, read_architecture(self._model).vocab_size)
        forward, _ = forward_parts(samples, self._config, data_ranks)
        return forward[data_rank], part_of(samples, self._config, data_ranks, data_rank)

    @contextmanager
    def _split_updates(self) -> Iterator[None]:
        """Measures the two phases of an update: the backend's accumulation and its step."""
        backend = type(self._worker._backends[Role.POLICY])  # pyright: ignore[reportPrivateUsage]

        def measured(name: str, phase: str) -> Any:
            return patch.object(backend, name, _in_phase(getattr(backend, name), functools.partial(self.phase, phase)))

        with measured("accumulate", "backward"), measured("step", "optimizer"):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block as a phase."""
        _RESET.write_text(_RESET_PEAK)
        yield
        self._peaks.setdefault(name, []).append(_peak())

    def _publish(self, epoch: int) -> None:
        """Gathers, micro-batches, hashes and sends all weights, to a group without receivers."""
        if self._rank == 0:
            self._served = ServedStore("127.0.0.1")
            address = self._served.renew()
            self._store.set(f"group/{epoch}", json.dumps([address.host, address.port, address.secret.hex()]))
        host, port, secret = json.loads(self._store.get(f"group/{epoch}"))
        members = self._worker._members  # pyright: ignore[reportPrivateUsage]
        group = WeightGroup(
            run_id="memory",
            epoch=epoch + 1,
            store_host=host,
            store_port=port,
            store_secret=bytes.fromhex(secret),
            world_size=len(members),
            backend="gloo",
            timeout_s=300,
        )
        self._worker.join(group=group.SerializeToString().hex())
        self._worker.send(version=epoch + 1, skips_base=False)
        self._worker.leave()


def _in_phase(method: Callable[..., Any], phase: Callable[[], Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with phase():
            return method(*args, **kwargs)

    return call


def _peak() -> int:
    return _status("VmHWM")


def _resident() -> int:
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
