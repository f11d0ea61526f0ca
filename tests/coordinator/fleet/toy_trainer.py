"""A trainer in a process of its own that only counts, and kills itself once during the step that `--die-in` names."""

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from lockstep.trainer.v1 import trainer_pb2_grpc

from services.common.rpc.server import Server
from tests.coordinator.daemon.harness import FakeTrainer


class MortalTrainer(FakeTrainer):
    """Dies in its update of `version`, unless the file `marker` says that it did so before."""

    def __init__(self, version: int, marker: Path) -> None:
        super().__init__()
        self._last_version, self._marker = version, marker

    async def Train(self, requests: AsyncIterator[Any], context: Any) -> Any:
        if self.version == self._last_version and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().Train(requests, context)


async def serve(listen: str, trainer: MortalTrainer) -> None:
    server = Server()
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server.grpc)
    await server.start(listen, ["lockstep.trainer.v1.TrainerService"])
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen")
    parser.add_argument("--die-in", type=int)
    parser.add_argument("--marker", type=Path)
    given, _ = parser.parse_known_args()
    asyncio.run(serve(given.listen, MortalTrainer(given.die_in, given.marker)))
