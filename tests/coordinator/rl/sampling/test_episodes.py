"""Tests episodes: streams of tokens, masks, limits, seeds, credits, and failures that are never rewarded."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.environment import PythonEnvironmentConfig
from services.common.config.rollout import SamplingConfig
from services.common.errors import InvalidInput, LockstepError, Reason
from services.common.rpc.transfer import seal
from services.common.tasks import gather
from services.coordinator.clients.environment import EpisodeFailed
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.rl.advantages import compute_advantages
from services.coordinator.rl.sampling.collect import Collector, PromptRequest
from tests.coordinator.fake_environment import FakeEnvironment, Script, episodes
from tests.coordinator.fake_services import FakeReplica, make_config, make_prompt, replicas
from tests.coordinator.text.bridge_families import make_tokenizer
from tests.support import raises

STAMP = PolicyStamp(version=2, digest="d" * 32)
SAMPLING = SamplingConfig(max_tokens=8)
# The columns that the trainer reads. loss_mask is checked separately, because none means the same as all true.
BATCH_COLUMNS = (
    "prompt_id",
    "group",
    "sample",
    "prompt_tokens",
    "tokens",
    "logprobs",
    "reward",
    "finish_reason",
    "seed",
)
CRASHED, TIMEOUT = pb.ENVIRONMENT_FAILURE_REASON_CRASHED, pb.ENVIRONMENT_FAILURE_REASON_TIMEOUT


class DigitTokenizer:
    """Writes a digit for each token below 10; nothing is special but token 1, which ends a turn."""

    eos_token_ids = (1,)
    has_chat_template = False
    template_variables = frozenset[str]()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(digit) if digit.isdigit() else 9 for digit in text]

    encode_marked = encode

    def as_text(self, text: str) -> str:
        return text

    def has_token(self, text: str) -> bool:
        return False

    def decode(self, tokens: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join(str(token % 10) for token in tokens)

    def decode_batch(self, texts: Any) -> list[str]:
        return list(map(self.decode, texts))


def ends_after(turns: int, *, reply: str = "777", reward: float = 0.5) -> Script:
    """Returns an environment that answers with `reply` and ends the episode after `turns` turns."""

    def script(turn: int, text: str) -> pb.StepResponse:
        messages = [pb.Message(role="", content=reply)]
        return pb.StepResponse(messages=messages, reward=reward * (turn + 1), done=turn + 1 == turns)

    return script


async def test_an_environment_hears_whether_a_turn_begins_within_reasoning_and_its_errors_are_counted():
    def script(turn: int, text: str) -> pb.StepResponse:
        messages = [pb.Message(role="", content="777" if turn == 1 else "7888")]
        return pb.StepResponse(messages=messages, done=turn == 2, num_calls=2, num_failed_calls=turn // 2)

    environment = FakeEnvironment(script)
    config = make_config(
        environment={"kind": "openenv", "url": "ws://nowhere", "reasoning_tags": ["777", "888"]},
        rollout={"max_model_len": 200, "sampling": {"max_tokens": 8}},
        data={"train": "x.parquet", "prompts_per_step": 8, "max_prompt_tokens": 16},
    )
    async with (
        replicas(1) as fakes,
        episodes(config, fakes, environment, STAMP, DigitTokenizer()) as collector,  # type: ignore[arg-type]
    ):
        await collector.one(0, make_prompt(0), PromptRequest(2, SAMPLING, STAMP, STAMP.version, keep_failed=False))
        assert sorted((step.turn, step.is_reasoning) for step in environment.steps) == [
            *2 * [(0, False)], *2 * [(1, False)], *2 * [(2, True)],
        ]  # fmt: skip
        assert collector.take_metrics()["environment/tool_error_share"] == pytest.approx(1 / 6)
        assert "environment/tool_error_share" not in collector.take_metrics()


async def played(
    environment: FakeEnvironment, *, num: int = 1, fakes: int = 1, **settings: Any
) -> list[ScoredGroup | None]:
    """Returns the groups of `num` prompts, of two episodes each."""
    async with replicas(fakes) as started:
        return await played_on(started, environment, num=num, **settings)


async def played_on(
    fakes: list[FakeReplica],
    environment: FakeEnvironment,
    *,
    num: int = 1,
    keep_failed: bool = False,
    overlong: str = "fail",
    **settings: Any,
) -> list[ScoredGroup | None]:
    config = make_config(
        environment={"kind": "python", "path": "m:C", **settings},
        rollout={"max_model_len": 200, "sampling": {"max_tokens": 8}},
        data={"train": "x.parquet", "prompts_per_step": 8, "max_prompt_tokens": 16, "overlong": overlong},
    )
    async with episodes(config, fakes, environment, STAMP, DigitTokenizer()) as collector:  # type: ignore[arg-type]
        draw = PromptRequest(2, SAMPLING, STAMP, STAMP.version, keep_failed=keep_failed)
        groups = await gather(collector.one(i, make_prompt(i), draw) for i in range(num))
        played_on.metrics = collector.take_metrics()  # type: ignore[attr-defined]
        return groups


async def test_turns_and_replies_are_one_stream_of_tokens():
    environment = FakeEnvironment(ends_after(3))
    (group,) = await played(environment, weight=2.0)
    assert group is not None
    table = to_table([group])
    for row in table.to_pylist():
        assert row["turn_begins"] == [0, 5, 10] and row["turn_ends"] == [2, 7, 12]
        assert row["tokens"][2:5] == row["tokens"][7:10] == [7, 7, 7]
        assert row["loss_mask"] == [True, True, False, False, False] * 2 + [True, True]
        assert row["logprobs"] == [-1, -2, 0, 0, 0, -1, -2, 0, 0, 0, -1, -2]
        assert row["turn_rewards"] == [1.0, 2.0, 3.0]
        assert dict(row["components"]) == {"fake": 1.0, "environment": 6.0}
        assert row["reward"] == 7.0
        assert (row["finish_reason"], row["environment"]) == ("stop", "fake 1")
    assert not environment.open, "every episode was closed"


async def test_each_turn_has_its_own_seed_and_the_first_that_of_a_single_completion():
    class Keeps(FakeReplica):
        def __init__(self, **options: Any):
            super().__init__(**options)
            self.asked: list[tuple[int, tuple[int, ...]]] = []

        async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
            self.asked += [(request.prompts[0].seeds[0], tuple(request.prompts[0].tokens))]
            async for answer in super().Generate(request, context):
                yield answer

    asked = []
    for _ in range(2):
        async with replicas(1, Keeps) as fakes:
            (group,) = await played_on(fakes, FakeEnvironment(ends_after(2)))
            asked.append(sorted(fakes[0].asked))
    assert asked[0] == asked[1]
    assert len({seed for seed, _ in asked[0]}) == 4
    assert group is not None
    firsts = {seed for seed, tokens in asked[0] if len(tokens) == 3}
    assert {completion.seed for completion in group.completions} == firsts
    contexts = [list(tokens) for _, tokens in asked[0] if len(tokens) > 3]
    assert sorted(contexts) == sorted([5, 5, 5, *completion.tokens[:5]] for completion in group.completions)


async def test_episodes_of_one_turn_are_the_samples_of_a_run_without_an_environment():
    names = [*BATCH_COLUMNS, "advantages"]
    tables = []
    for settings in ({}, {"environment": {"kind": "python", "path": "m:C", "max_turns": 1}}):
        config = make_config(
            rollout={"max_model_len": 200, "sampling": {"max_tokens": 8}},
            data={"train": "x.parquet", "prompts_per_step": 8, "max_prompt_tokens": 16},
            **settings,
        )
        environment = FakeEnvironment(ends_after(1, reward=0.0))
        with_environment = config.model_copy(update={"environment": PythonEnvironmentConfig(path="m:C", max_turns=1)})
        async with (
            replicas(2) as fakes,
            episodes(with_environment, fakes, environment, STAMP, DigitTokenizer()) as collector,  # type: ignore[arg-type]
        ):
            if not settings:
                collector = Collector(collector._rollout, collector._rewards, collector._tokenizer, config.seed)
            draw = PromptRequest(4, SAMPLING, STAMP, STAMP.version)
            groups = await gather(collector.one(i, make_prompt(i), draw) for i in range(8))
            samples = to_table([group for group in groups if group])
            assert len(environment.steps) == (32 if settings else 0)
            tables.append(compute_advantages(samples, config.advantage, kl_coef=0.0))
    plain, episodic = tables
    assert plain.select(names).equals(episodic.select(names)) and plain.num_rows == 32
    for row in episodic.to_pylist():
        assert row["loss_mask"] == [True] * len(row["tokens"]) and row["turn_ends"] == [len(row["tokens"])]


async def test_all_samples_of_a_prompt_meet_the_same_task():
    environment = FakeEnvironment(ends_after(1))
    environment.first = [pb.Message(role="", content="42")]
    groups = await played(environment, num=3)
    seeds = {request.episode_id.split("/")[0]: request.seed for request in environment.resets}
    assert len(environment.resets) == 6 and len(set(seeds.values())) == 3
    assert all(request.seed == seeds[request.episode_id.split("/")[0]] for request in environment.resets)
    assert [group.prompt.tokens for group in groups if group] == [(5, 5, 5, 4, 2)] * 3


@pytest.mark.parametrize(
    ("settings", "reason", "turns"),
    [
        ({"max_turns": 2}, "turn_limit", 2),
        ({"max_turns": 2, "max_tokens": 6}, "length", 2),  # the last turn is cut off
        ({"max_tokens": 12}, "length", 3),  # three turns of 2 tokens and two replies of 3
        ({"max_tokens": 10}, "length", 2),  # no token would be left for a third turn
    ],
)
async def test_limits_end_an_episode_with_the_rewards_so_far(settings: dict[str, int], reason: str, turns: int):
    (group,) = await played(FakeEnvironment(ends_after(9)), **settings)
    assert group is not None
    for row in to_table([group]).to_pylist():
        assert row["finish_reason"] == reason
        assert len(row["turn_begins"]) == turns
        assert len(row["tokens"]) <= settings.get("max_tokens", 99)
        assert row["turn_ends"][-1] == len(row["tokens"]), "it ends with a turn of the policy"
    without_room = played_on.metrics.get("environment/no_room", 0)  # type: ignore[attr-defined]
    assert without_room == (0 if "max_turns" in settings else 2)


@pytest.mark.parametrize("failures", [[CRASHED], [TIMEOUT, CRASHED]])
async def test_a_failed_episode_is_played_again_with_the_same_seeds(failures: list[Any]):
    (undisturbed,) = await played(FakeEnvironment(ends_after(2)))
    environment = FakeEnvironment(ends_after(2), failures)
    (group,) = await played(environment)
    assert group is not None and undisturbed is not None
    assert to_table([group]).equals(to_table([undisturbed]))
    assert len(environment.resets) == 2 + len(failures)
    failed = [number for name, number in played_on.metrics.items() if "failed" in name]  # type: ignore[attr-defined]
    assert sum(failed) == len(failures)


@pytest.mark.parametrize("own", ["1 + 1?", ({"role": "user", "content": "1 + 1?"},)])
@pytest.mark.parametrize("answer", ["2", None])
async def test_an_environment_gets_the_row_and_not_the_rendered_prompt(own: Any, answer: str | None):
    environment = FakeEnvironment(ends_after(1))
    config = make_config(environment={"kind": "python", "path": "m:C"})
    async with (
        replicas(1) as fakes,
        episodes(config, fakes, environment, STAMP, DigitTokenizer()) as collector,  # type: ignore[arg-type]
    ):
        row = {"text": "<|user|>1 + 1?<|assistant|>", "answer": answer, "extra": {"level": None}, "row_prompt": own}
        await collector.one(0, replace(make_prompt(3), **row), PromptRequest(1, SAMPLING, STAMP, STAMP.version))
    (request,) = environment.resets
    expected = {"prompt": own if isinstance(own, str) else list(own), "level": None}
    assert json.loads(request.row_json) == expected | ({"answer": answer} if answer else {})


async def test_a_lost_episode_is_played_again():
    (undisturbed,) = await played(FakeEnvironment(ends_after(3)))
    environment = FakeEnvironment(ends_after(3))
    environment.forgets_before = {0, 2}
    (group,) = await played(environment, max_retries=0)  # which the loss of the service does not use up
    assert group is not None and undisturbed is not None
    assert to_table([group]).equals(to_table([undisturbed]))
    assert played_on.metrics["environment/failed_lost"] == 2.0  # type: ignore[attr-defined]


async def test_an_environment_that_says_nothing_after_the_end_of_a_turn_fails():
    environment = FakeEnvironment(lambda turn, text: pb.StepResponse(done=turn == 1))
    with pytest.raises(EpisodeFailed, match="invalid_reply: turn 0 has ended, and the environment returned no message"):
        await played(environment, on_failure="fail", max_retries=0)


async def test_a_group_whose_environment_keeps_failing_is_dropped_and_never_rewarded():
    assert await played(FakeEnvironment(ends_after(2), [CRASHED] * 6), max_retries=2) == [None]
    with pytest.raises(EpisodeFailed, match="crashed: on demand") as raised:
        await played(FakeEnvironment(ends_after(2), [CRASHED] * 6), on_failure="fail")
    assert raised.value.reason is Reason.ENVIRONMENT_FAILED


@pytest.mark.parametrize("number", [*pb.EnvironmentFailureReason.values(), 99])
async def test_every_reason_of_an_environment_has_a_name(number: Any):
    (group,) = await played(FakeEnvironment(ends_after(1), [number] * 2), keep_failed=True, max_retries=0)
    known = (
        pb.EnvironmentFailureReason.Name(number) if number in pb.EnvironmentFailureReason.values() else "UNSPECIFIED"
    )
    word = known.removeprefix("ENVIRONMENT_FAILURE_REASON_").lower()
    assert played_on.metrics[f"environment/failed_{word}"] == 2.0  # type: ignore[attr-defined]
    said = "" if word == "neighbor" else f"environment: {word}: on demand"  # one that others have hurt is played again
    assert group is not None and group.scores[0].failure.message == said


@pytest.mark.parametrize("on_failure", ["drop_group", "fail"])
async def test_an_episode_that_begins_too_long_is_dropped_once_and_never_ends_the_run(on_failure: str):
    environment = FakeEnvironment(ends_after(1))
    environment.first = [pb.Message(role="", content="7" * 14)]
    assert await played(environment, overlong="drop", on_failure=on_failure) == [None]
    # The same seeds begin the same way, so nothing is played again; the other sample may have been given up before.
    assert 1 <= len(environment.resets) <= 2
    assert 1.0 <= played_on.metrics["environment/failed_overlong"] <= 2.0  # type: ignore[attr-defined]
    (group,) = await played(environment, overlong="drop", on_failure=on_failure, keep_failed=True)
    assert group is not None and group.is_failed.tolist() == [True, True]
    with pytest.raises(InvalidInput, match=r"17 tokens, above data\.max_prompt_tokens 16: .* data\.overlong=drop"):
        await played(environment, on_failure=on_failure)
    environment.first = [pb.Message(role="", content="7" * 13)]
    (group,) = await played(environment)
    assert group is not None and len(group.prompt.tokens) == 16


async def test_an_episode_that_a_chat_api_would_show_differently_is_named(caplog: pytest.LogCaptureFixture):
    def script(turn: int, text: str) -> pb.StepResponse:
        return pb.StepResponse(messages=[pb.Message(role="user", content="Again.")], done=turn == 2)

    chatml = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for content, differing in (("m.content", 0), ("m.content[m.content | length == 2:]", 2)):
        tokenizer = make_tokenizer(chatml.replace("CONTENT", content), eos=("<|im_end|>",))
        config = make_config(
            environment={"kind": "python", "path": "m:C"},
            rollout={"sampling": {"max_tokens": 8}, "max_model_len": 4096},
        )
        prompt = replace(make_prompt(0), messages=({"role": "user", "content": "Hi"},))
        caplog.clear()
        async with (
            replicas(1) as fakes,
            episodes(config, fakes, FakeEnvironment(script), STAMP, tokenizer) as collector,
        ):
            group = await collector.one(0, prompt, PromptRequest(2, SAMPLING, STAMP, STAMP.version))
            assert group is not None
            assert collector.take_metrics().get("environment/rendered_differently", 0) == differing
        warned = [one for one in caplog.records if "will not show the model the text" in one.getMessage()]
        assert [one.levelname for one in warned if one.levelname == "WARNING"] == ["WARNING"] * (differing > 0)


async def test_an_evaluation_counts_failed_episodes_as_failed():
    groups = await played(FakeEnvironment(ends_after(1), [CRASHED] * 2), keep_failed=True, max_retries=0)
    (group,) = groups
    assert group is not None
    assert group.is_failed.tolist() == [True, True]
    assert group.rewards.tolist() == [0, 0]


async def test_a_turn_goes_elsewhere_when_its_replica_dies():
    (undisturbed,) = await played(FakeEnvironment(ends_after(3)), fakes=2)
    async with replicas(2) as fakes:
        died = asyncio.Event()

        async def die_in_second_turn(prompt: Any) -> None:
            if len(prompt.tokens) > 3 and not died.is_set():
                died.set()
                await fakes[0].die()

        fakes[0].before_answer = die_in_second_turn
        (group,) = await played_on(fakes, FakeEnvironment(ends_after(3)))
    assert died.is_set()
    assert group is not None and undisturbed is not None
    assert to_table([group]).equals(to_table([undisturbed]))


async def test_a_turn_of_other_weights_than_its_sample_is_refused():
    """A sample has one stamp for all its turns, so the trainer cannot see that one turn is of other weights."""

    class Forgetful(FakeReplica):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
            async for answer in super().Generate(request, context):
                answer.stamp.version += len(request.prompts[0].tokens) > 3  # not in the first turn
                answer.ClearField("sha256")
                yield seal(request, answer)

    async with replicas(1, Forgetful) as fakes:
        with pytest.raises(LockstepError, match=r"turn 1 was sampled from version 3 .* not from version 2") as raised:
            await played_on(fakes, FakeEnvironment(ends_after(3)))
    assert raised.value.reason is Reason.STALE_STAMP


async def test_an_environment_must_begin_alike_for_all_samples():
    environment = FakeEnvironment(ends_after(1))
    sent = iter(["1", "2"])

    async def reset(request: Any, context: Any) -> pb.ResetResponse:
        environment.open[request.episode_id] = 0
        return pb.ResetResponse(messages=[pb.Message(role="", content=next(sent))])

    environment.Reset = reset  # type: ignore[method-assign]
    with raises(InvalidInput, field="environment"):
        await played(environment)
