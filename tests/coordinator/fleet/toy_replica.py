"""A replica in a process of its own with made-up answers. It kills itself once, in a call of the method `--die-in`."""

import argparse
import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from services.common.errors import PreconditionFailed, Reason
from tests.coordinator.fake_services import FakeReplica


class MortalReplica(FakeReplica):
    """Dies in the call of `method` for `version`, unless the file `marker` says that it did so before.

    Its process holds no run and no weights at first, and refuses calls that need them, as a real one does.
    """

    def __init__(self, listen: str, method: str, version: int, marker: Path) -> None:
        super().__init__()
        self.address = listen
        self._method, self._version, self._marker = method, version, marker

    def _reach(self, method: str, version: int) -> None:
        if (method, version) == (self._method, self._version) and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    async def GetInfo(self, request: Any, context: Any) -> Any:
        answer = await super().GetInfo(request, context)
        answer.num_workers = int(self.num_opens > 0)
        return answer

    async def Generate(self, request: Any, context: Any) -> Any:
        if request.expected_stamp not in self.committed[-1:]:
            self.error["Generate"] = PreconditionFailed("nothing is served", reason=Reason.NOT_SERVING)
        self._reach("Generate", request.expected_stamp.version)
        async for answer in super().Generate(request, context):
            yield answer

    async def JoinWeightGroup(self, request: Any, context: Any) -> Any:
        self._require_open()
        return await super().JoinWeightGroup(request, context)

    async def ReceiveWeights(self, request: Any, context: Any) -> Any:
        self._require_open()
        self._reach("ReceiveWeights", request.version)
        self.digest = f"digest {request.version}"  # of what CountingRank sends
        return await super().ReceiveWeights(request, context)

    async def CommitWeights(self, request: Any, context: Any) -> Any:
        self._reach("CommitWeights", request.stamp.version)
        answer = await super().CommitWeights(request, context)
        self._marker.with_suffix(".pid").write_text(str(os.getpid()))
        return answer

    def _require_open(self) -> None:
        if not self.num_opens:
            raise PreconditionFailed("no run is open", reason=Reason.RUN_NOT_OPEN)


async def serve(replica: MortalReplica) -> None:
    await replica.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen")
    parser.add_argument("--die-in")
    parser.add_argument("--version", type=int)
    parser.add_argument("--marker", type=Path)
    given, _ = parser.parse_known_args()
    asyncio.run(serve(MortalReplica(given.listen, given.die_in, given.version, given.marker)))
