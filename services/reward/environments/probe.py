"""Opens an environment and plays episodes of it, one call at a time: `python -m services.reward.environments.probe`.

    -> {"environment": {"kind": "python", ...}}               section of a config
    <- {"version": "1/3f2a...", "tools": [{...}]}             it is open; with JSON schemas
    -> {"reset": {"prompt": ..., "answer": ...}, "seed": 7}   begins an episode, after the end of the one before
    <- {"messages": [{"role": "user", "content": "..."}]}     or {"failure": {"reason": "...", "message": "..."}}
    -> {"step": "..."}                                        the policy's text
    <- {"messages": [...], "reward": 1.0, "done": true, "tool_calls": [...]}     what is zero or empty is left out

It ends with its input. If the environment does not open, the exit code is 1 and the last line of stderr says why.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from lockstep.reward.v1 import environment_pb2 as pb
from prometheus_client import CollectorRegistry

from services.common.config.environment import EnvironmentConfig, EnvironmentSection, WorkerEnvironmentConfig
from services.common.errors import PreconditionFailed
from services.reward.environments.base import Turn
from services.reward.environments.episode import EpisodeContext
from services.reward.environments.servicer import EpisodeTable, make_environment
from services.reward.errors import EpisodeError
from services.reward.metrics import RewardMetrics


async def _probe(config: EnvironmentConfig) -> None:
    one_worker = {"num_workers": 1} if isinstance(config, WorkerEnvironmentConfig) else {}
    environment = make_environment(config.model_copy(update=one_worker))
    try:
        await environment.open()
    except BaseException:
        await environment.close()
        raise
    context = EpisodeContext(environment, config.turn_s, RewardMetrics(CollectorRegistry()))
    episodes = _Episodes(EpisodeTable(context, config.episode_s))
    try:
        _write({"version": environment.version, "tools": list(environment.tools)})
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                _write(await episodes.play(json.loads(line)))
            except PreconditionFailed as error:  # a step after the end
                _write({"failure": {"reason": error.reason, "message": error.message}})
    finally:
        await episodes.table.close()


class _Episodes:
    def __init__(self, table: EpisodeTable):
        self.table = table
        self._num_episodes = self._num_turns = 0

    async def play(self, call: Mapping[str, Any]) -> Mapping[str, object]:
        if "reset" in call:
            await self.table.end(str(self._num_episodes))
            self._num_episodes, self._num_turns = self._num_episodes + 1, 0
            request = pb.ResetRequest(episode_id=str(self._num_episodes), seed=call["seed"])
            return _plain(await self.table.reset(request, call["reset"]))
        request = pb.StepRequest(episode_id=str(self._num_episodes), turn=self._num_turns, text=call["step"])
        self._num_turns += 1
        num_tokens = len(call["step"].split())  # there is no tokenizer here
        return _plain(await self.table.step(request, Turn(call["step"], num_tokens, is_truncated=False)))


def _plain(answer: pb.ResetResponse | pb.StepResponse) -> Mapping[str, object]:
    return MessageToDict(answer, preserving_proto_field_name=True)


def _write(answer: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Plays until the end of input."""
    section = json.loads(sys.stdin.readline())["environment"]
    try:
        asyncio.run(_probe(EnvironmentSection.model_validate(section).root))
    except EpisodeError as error:
        sys.exit(" ".join(error.detail.split()))


if __name__ == "__main__":
    main()
