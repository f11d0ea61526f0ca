"""Checks of what a reward service needs: `python -m services.reward.probe sandbox|scorers|environment|agent`.

`environment` opens one and plays episodes of it, one call at a time:

    -> {"environment": {"kind": "python", ...}}               section of a config
    <- {"version": "1/3f2a...", "tools": [{...}], "roles": ["user"]}  it is open; with JSON schemas
    -> {"reset": {"prompt": ..., "answer": ...}, "seed": 7}   begins an episode, after the end of the one before
    <- {"messages": [{"role": "user", "content": "..."}]}     or {"failure": {"reason": "...", "message": "..."}}
    -> {"step": "...", "is_reasoning": false}                 the policy's text; whether it begins within reasoning
    <- {"messages": [...], "reward": 1.0, "done": true, "tool_calls": [...]}     what is zero or empty is left out

`agent` opens one in the same way, at a "place" if it is elsewhere (its "host", and "tls", a directory), and plays one
episode of it. The messages are those of AgentService.Play:

    -> {"begin": {"row_json": "...", "seed": 7, ...}}
    <- {"call": {...}}                                        or the last: {"end": {...}} or {"failure": {...}}
    -> {"answer": {...}}
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from google.protobuf.json_format import MessageToDict, ParseDict
from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.reward.v1.agent_pb2 import PlayRequest
from prometheus_client import CollectorRegistry

from services.common.config.environment import EnvironmentSection, WorkerEnvironmentConfig
from services.common.config.load import parse_json
from services.common.config.reward import RewardConfig
from services.common.errors import PreconditionFailed
from services.common.probe import Answers, Requests, answer_with
from services.common.rpc.fence import Fence
from services.common.rpc.tls import Credentials
from services.reward.agents.runners import Place
from services.reward.agents.servicer import AgentServicer
from services.reward.environments.base import EpisodeError, Turn
from services.reward.environments.episode import EpisodeContext
from services.reward.environments.servicer import KINDS, EpisodeTable
from services.reward.errors import ScoringError
from services.reward.metrics import RewardMetrics
from services.reward.sandbox import Limits, Sandbox
from services.reward.scorers.base import Item
from services.reward.scoring import Outcome, ScoringRun

_LIMITS = Limits(timeout_s=10.0, memory_bytes=1 << 30, disk_bytes=16 << 20, max_processes=8, max_output_bytes=1 << 20)


async def sandbox(requests: Requests) -> Answers:
    async for _ in requests:
        made = Sandbox(_LIMITS)
        try:
            await made.open()
        except ScoringError as error:
            raise PreconditionFailed(error.detail) from error
        finally:
            made.close()
        yield {}


async def scorers(requests: Requests) -> Answers:
    """Starts scorers with one worker each, and scores samples.

    A request has the section `reward`, as text, and `groups`, each a list of the fields of `Item`. The answer has
    `outcomes`, for each sample its `reward`, or why it has none as `failure`.
    """
    async for request in requests:
        run = ScoringRun(parse_json(RewardConfig, request["reward"]).model_copy(update={"num_workers": 1}))
        try:
            await run.open()
            groups = [[Item(**fields) for fields in group] for group in request["groups"]]
            scored = [outcome for group in groups for outcome in await run.score(group)]
        finally:
            await run.close()
        yield {"outcomes": [_outcome_fields(outcome) for outcome in scored]}


def _outcome_fields(outcome: Outcome) -> dict[str, object]:
    if why := outcome.failure:
        return {"failure": f"{outcome.failed_scorer} fails with {why.reason}: {why.detail}"}
    return {"reward": outcome.reward}


async def environment(requests: Requests) -> Answers:
    config = EnvironmentSection.model_validate((await anext(requests))["environment"]).root
    assert config.kind != "agent", "it has a check of its own"
    one_worker = {"num_workers": 1} if isinstance(config, WorkerEnvironmentConfig) else {}
    tried = KINDS[config.kind](config.model_copy(update=one_worker))
    try:
        await tried.open()
    except BaseException as error:
        await tried.close()
        if isinstance(error, EpisodeError):
            raise PreconditionFailed(" ".join(error.detail.split())) from error
        raise
    context = EpisodeContext(tried, config.turn_s, RewardMetrics(CollectorRegistry()))
    table, num_episodes, num_turns = EpisodeTable(context, config.episode_s), 0, 0
    try:
        yield {"version": tried.version, "tools": list(tried.tools), "roles": list(tried.roles)}
        async for call in requests:
            if "reset" in call:
                await table.end(str(num_episodes))
                num_episodes, num_turns = num_episodes + 1, 0
                playing = table.reset(pb.ResetRequest(episode_id=str(num_episodes), seed=call["seed"]), call["reset"])
            else:
                request = pb.StepRequest(episode_id=str(num_episodes), turn=num_turns, text=call["step"])
                num_tokens = len(call["step"].split())  # there is no tokenizer here
                turn = Turn(call["step"], num_tokens, False, call.get("is_reasoning", False))
                playing = table.step(request, turn)
                num_turns += 1
            try:
                yield MessageToDict(await playing, preserving_proto_field_name=True)
            except PreconditionFailed as error:  # a step after the end
                yield {"failure": {"reason": error.reason, "message": error.message}}
    finally:
        await table.close()


async def agent(requests: Requests) -> Answers:
    opening = await anext(requests)
    config = EnvironmentSection.model_validate(opening["environment"]).root
    assert config.kind == "agent", "others take turns"
    at = opening.get("place") or {"host": "127.0.0.1", "tls": ""}
    place = Place(at["host"], Credentials(Path(at["tls"])) if at["tls"] else None)
    servicer = AgentServicer(RewardMetrics(CollectorRegistry()), Fence(), place)

    async def answers() -> AsyncIterator[PlayRequest]:
        async for said in requests:
            yield ParseDict(said, PlayRequest())
        servicer.end_episodes()  # nobody answers any more

    try:
        yield {"version": (await servicer.open("probe", config)).environment}
        async for said in requests:
            begin = ParseDict(said, PlayRequest()).begin
            async with aclosing(servicer.play(begin, answers())) as responses:
                async for response in responses:
                    yield MessageToDict(response, preserving_proto_field_name=True)
    finally:
        await servicer.end()


if __name__ == "__main__":
    answer_with({"sandbox": sandbox, "scorers": scorers, "environment": environment, "agent": agent})
