"""Tests the selection of groups: it is deterministic, and every decision is in the ledger."""

import asyncio
import json
import random
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.types.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Completion
from pydantic import ValidationError

from services.common.config.run import Config
from services.common.errors import InvalidInput, LockstepError, Reason
from services.coordinator.clients.replica import ReplicaState
from services.coordinator.data.groups import ScoredGroup
from services.coordinator.data.prompts import Prompt, require_enough
from services.coordinator.rl.sampling.selection import Drop, Selected, select
from tests.coordinator.fake_services import make_config, make_prompt
from tests.coordinator.fake_steps import GREEDY_TOKEN, stamp_of, steps
from tests.support import raises, until


def config_of(prompts_per_step: int = 4, **sections: Any) -> Config:
    data = {"train": "x.parquet", "prompts_per_step": prompts_per_step}
    return make_config(**{"data": data, "rollout": {"completions_per_prompt": 2}, **sections})


def group_of(index: int, prompt: Prompt, rewards: list[float], lengths: str = "ss") -> ScoredGroup:
    """Returns a group with these rewards; `lengths` has l for a truncated sample and s for one that stopped."""
    reasons = {"s": FINISH_REASON_STOP, "l": FINISH_REASON_LENGTH}
    completions = [Completion(tokens=[4], logprobs=[-1], finish_reason=reasons[letter]) for letter in lengths]
    return ScoredGroup(index, prompt, completions, stamp_of(0), [Score(reward=r) for r in rewards], "fake")


KINDS: dict[str, Callable[[int, Prompt], ScoredGroup | None]] = {
    "mixed": lambda index, prompt: group_of(index, prompt, [0, 1]),
    "same": lambda index, prompt: group_of(index, prompt, [0.3, 0.1 + 0.2]),
    "unscored": lambda index, prompt: None,
    "truncated": lambda index, prompt: group_of(index, prompt, [0, 1], "ll"),
}


async def select_of(config: Config, kinds: list[str], seed: int) -> Selected:
    """Selects among groups of these kinds, which become ready after a random number of event-loop iterations."""
    chance = random.Random(seed)

    async def draw(index: int, prompt: Prompt) -> ScoredGroup | None:
        for _ in range(chance.randrange(30)):
            await asyncio.sleep(0)
        return KINDS[kinds[index]](index, prompt)

    return await select(config, (make_prompt(index) for index in range(len(kinds))), draw)


CONFIGS = {
    factor: config_of(
        selection={
            "dynamic": {"enabled": True, "max_rounds": 5},
            "over_sampling": {"factor": factor},
            "overlong": {"mask_truncated": True},
        },
        trainer={"num_minibatches": 2},
    )
    for factor in (1.0, 1.5, 2.0)
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["mixed", "mixed", *KINDS]), min_size=8, max_size=30),
    st.sampled_from(list(CONFIGS)),
    st.integers(0, 2**20),
)
def test_the_batch_is_the_first_useful_groups_whatever_the_timing(kinds: list[str], factor: float, seed: int):
    config = CONFIGS[factor]
    useful = [index for index, kind in enumerate(kinds[:20]) if kind == "mixed"]
    if len(useful) < 2:  # fewer than one group per mini-batch
        with raises(LockstepError, reason=Reason.TOO_FEW_GROUPS):
            asyncio.run(select_of(config, kinds, seed))
        return
    selected = asyncio.run(select_of(config, kinds, seed))
    wanted = useful[: min(4, len(useful) // 2 * 2)]
    assert [group.index for group in selected.groups] == wanted
    num_prompts = useful[3] + 1 if len(useful) >= 4 else min(20, len(kinds))
    reasons = {"same": "zero_variance", "unscored": "no_score", "truncated": "all_truncated"}
    dropped = {f"p{i}": reasons[kind] for i, kind in enumerate(kinds[:num_prompts]) if kind in reasons}
    assert selected.decision["dropped"] == dropped
    assert selected.decision["num_prompts"] == num_prompts
    assert selected.metrics["sampling/rounds"] == num_prompts / 4
    if factor == 1:  # no more prompts than the batch needs
        assert selected.metrics["sampling/aborted"] == 0
        assert selected.metrics["sampling/discarded"] == len(useful[:4]) - len(wanted)


async def test_without_dynamic_sampling_nothing_is_replaced():
    selected = await select_of(config_of(), ["same", "mixed", "unscored", "truncated", "mixed"], 0)
    assert [group.index for group in selected.groups] == [0, 1, 3]
    assert selected.decision["dropped"] == {"p2": Drop.NO_SCORE}


async def test_arrival_keeps_the_fastest_and_aborts_the_rest():
    config = config_of(selection={"over_sampling": {"factor": 1.5, "keep": "arrival"}})
    never, done = asyncio.Event(), []

    async def draw(index: int, prompt: Prompt) -> ScoredGroup:
        if index in (0, 3):
            try:
                await never.wait()
            finally:
                done.append(index)
        for _ in range(6 - index):
            await asyncio.sleep(0)
        return group_of(index, prompt, [0, 1])

    selected = await select(config, map(make_prompt, range(9)), draw)
    assert [group.index for group in selected.groups] == [5, 4, 2, 1]
    assert sorted(done) == [0, 3]
    assert selected.decision["keep"] == "arrival"
    assert selected.metrics["sampling/aborted"] == 2


@pytest.mark.parametrize(("on_budget", "kept"), [("train", [2, 5]), ("fail", None)])
async def test_a_budget_that_is_used_up(on_budget: str, kept: list[int] | None):
    selection = {"dynamic": {"enabled": True, "max_rounds": 2, "on_budget": on_budget}}
    config = config_of(selection=selection, trainer={"num_minibatches": 2})
    kinds = ["same", "same", "mixed", "same", "unscored", "mixed", "same", "mixed", "mixed", "mixed"]  # 8 are tried
    if kept is None:
        with pytest.raises(LockstepError, match=r"3 of 4 .* 8 prompts, .* 1 no_score, 4 zero_variance") as raised:
            await select_of(config, kinds, 0)
        assert raised.value.reason is Reason.TOO_FEW_GROUPS
        return
    selected = await select_of(config, kinds, 0)
    assert [group.index for group in selected.groups] == kept
    assert selected.decision["discarded"] == ["p7"]  # a multiple of the number of mini-batches is kept


async def test_too_few_samples_for_the_ranks_is_an_error():
    config = config_of(selection={"dynamic": {"enabled": True, "max_rounds": 1}}, trainer={"num_ranks": 3})
    assert len((await select_of(config, ["mixed", "mixed", "same", "same"], 0)).groups) == 2
    with raises(LockstepError, reason=Reason.TOO_FEW_GROUPS):
        await select_of(config, ["mixed", "same", "same", "same"], 0)


async def test_the_variance_of_a_component_ignores_a_length_penalty():
    dynamic = {"enabled": True, "component": "exact", "max_rounds": 2}
    scorers = [{"kind": "exact"}, {"kind": "length", "target_tokens": 8, "max_tokens": 16}]
    config = config_of(1, selection={"dynamic": dynamic}, reward={"scorers": scorers})

    async def draw(index: int, prompt: Prompt) -> ScoredGroup:
        group = group_of(index, prompt, [])
        exact = [(1, 1), (0, 1)][index]
        scores = [Score(reward=e - l, components={"exact": e, "length": -l}) for e, l in zip(exact, (0, 0.5))]  # noqa: B905, E741
        return ScoredGroup(**{**vars(group), "scores": scores})

    assert [group.index for group in (await select(config, map(make_prompt, range(2)), draw)).groups] == [1]


async def test_the_curriculum_counts_the_passes_that_there_are_on_paper():
    async def draw(index: int, prompt: Prompt) -> ScoredGroup:
        return group_of(index, prompt, [0.7 + 0.2 + 0.1, 1 - 1e-6])

    config = config_of(1, selection={"curriculum": {"enabled": True}})
    assert (await select(config, map(make_prompt, range(1)), draw)).outcomes == {"p0": (2, 1)}


async def test_a_failure_of_one_call_ends_the_others():
    ended = []

    async def draw(index: int, prompt: Prompt) -> ScoredGroup:
        if index == 1:
            raise LockstepError("broken")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)
        raise AssertionError

    with pytest.raises(LockstepError, match="broken"):
        await select(config_of(), map(make_prompt, range(4)), draw)
    assert sorted(ended) == [0, 2, 3]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"selection": {"dynamic": {"enabled": True, "component": "maths"}}},
            r"dynamic\.component maths is not one of .*: exact",
        ),
        ({"selection": {"curriculum": {"enabled": True, "component": "maths"}}}, r"curriculum\.component maths"),
        ({"selection": {"curriculum": {"enabled": True, "low": 0.8, "high": 0.2}}}, "low 0.8 must be at most high 0.2"),
        (
            {
                "selection": {"dynamic": {"enabled": True}},
                "advantage": {"kind": "remax"},
                "rollout": {"completions_per_prompt": 1},
            },
            "must be at least 2",
        ),
    ],
)
def test_a_config_that_cannot_work(sections: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        config_of(**sections)


def rule(prompt_id: str, token: int) -> float | None:
    """Gives rewards by prompt id modulo 4: always 1, mixed, always 0, mixed with a failure."""
    kind = int(prompt_id[1:]) % 4
    if kind == 3 and token % 7 == 0:
        return None
    return float({0: True, 1: token % 2, 2: False, 3: token % 2}[kind])


def decisions(config: Config, kind: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(config.run_dir / "ledger.sqlite")) as database:
        rows = database.execute("SELECT version, body FROM decisions WHERE kind = ? ORDER BY seq", (kind,))
        return [{"version": version, **json.loads(body)} for version, body in rows]


async def test_steps_with_dynamic_sampling_and_what_the_ledger_keeps(tmp_path: Path):
    config = config_of(
        runs_dir=tmp_path, selection={"dynamic": {"enabled": True}}, rollout={"completions_per_prompt": 4}
    )
    async with steps(config, 40, rule) as given:
        chance = random.Random(0)
        given.replica.before_answer = lambda prompt: asyncio.sleep(chance.uniform(0, 0.01))
        batches = await given.live(0, 3)
        again = config.model_copy(update={"name": "again"})
        given.config = again
        repeated = await given.live(0, 3)
    for version, batch in batches.items():
        assert batch.equals(repeated[version])
        rewards = batch["reward"].to_numpy().reshape(4, 4)
        assert (rewards.min(axis=1) < rewards.max(axis=1)).all()
    selected, finished = decisions(config, "selected"), decisions(config, "finished")
    assert selected == decisions(again, "selected")
    assert [row["version"] for row in selected] == [0, 1, 2]
    for row, step in zip(selected, finished, strict=True):
        trained = set(batches[row["version"]]["prompt_id"].to_pylist())
        assert row["num_prompts"] == len(trained) + len(row["dropped"]) and not trained & set(row["dropped"])
        assert all(row["dropped"][p] == "zero_variance" for p in row["dropped"] if int(p[1:]) % 2 == 0)
        reasons = list(row["dropped"].values())
        assert step["sampling/dropped_zero_variance"] == reasons.count("zero_variance")
        assert step["sampling/dropped_no_score"] == reasons.count("no_score")
        assert step["sampling/rounds"] == row["num_prompts"] / 4
    assert sum(step["sampling/dropped_zero_variance"] for step in finished) > 0
    assert sum(step["sampling/dropped_no_score"] for step in finished) > 0


async def test_over_sampling_aborts_in_the_engine_and_replicas_go_on(tmp_path: Path):
    over_sampling = {"factor": 2, "keep": "arrival"}
    config = config_of(runs_dir=tmp_path, selection={"over_sampling": over_sampling})
    async with steps(config, 8, lambda prompt_id, token: float(token % 2)) as given:
        never = asyncio.Event()
        slow = {"p0", "p3", "p5"}

        async def before_answer(prompt: Any) -> None:
            if prompt.prompt_id in slow:
                await never.wait()

        given.replica.before_answer = before_answer
        batch = (await given.live(0, 1))[0]
        assert not set(batch["prompt_id"].to_pylist()) & slow
        await until(lambda: not given.replica.in_flight)  # the calls are canceled in the engine too
        replica = given.collector._rollout.replicas[0]
        assert replica.state is ReplicaState.SERVING and replica.samples_in_flight == 0
        # A restarted coordinator uses the recorded batch, although other groups would be faster now.
        slow.clear()
        slow.update(batch["prompt_id"].to_pylist())
        assert (await given.live(0, 1))[0].equals(batch)
        sampled, recorded = decisions(config, "finished")
        assert sampled["time/tokens_per_s"] > 0 and "time/tokens_per_s" not in recorded
        await given.live(0, 2)
        assert ["time/tokens_per_s" in row for row in decisions(config, "finished")[2:]] == [False, True]
    assert [row["keep"] for row in decisions(config, "selected")] == ["arrival"] * 2  # of the two steps sampled


def test_more_prompts_at_once_than_there_are():
    config = config_of(selection={"over_sampling": {"factor": 1.3}})
    require_enough(6, config)
    with raises(InvalidInput, field="selection.over_sampling.factor") as raised:
        require_enough(5, config)
    assert "4 x selection.over_sampling.factor 1.3 = 6 prompts at once, but data.train has 5" in raised.value.message


@pytest.fixture
async def truncated(tmp_path: Path) -> AsyncIterator[tuple[Config, pa.Table]]:
    """Collects a batch of 4 groups of 6 samples; samples with an even first token are truncated."""
    selection = {"overlong": {"mask_truncated": True}, "dynamic": {"enabled": True}}
    config = config_of(runs_dir=tmp_path, selection=selection, rollout={"completions_per_prompt": 6})
    async with steps(config, 20, lambda prompt_id, token: float(token % 4 < 2)) as given:
        given.replica.is_long = lambda token: token % 2 == 0
        yield config, (await given.live(0, 1))[0]


async def test_truncated_samples_are_masked_but_count_in_their_group(truncated: tuple[Config, pa.Table]):
    config, batch = truncated
    is_long = [reason == "length" for reason in batch["finish_reason"].to_pylist()]
    assert 0 < sum(is_long) < len(is_long) == 24
    masks = zip(batch["tokens"].to_pylist(), batch["loss_mask"].to_pylist(), is_long, strict=True)
    for tokens, mask, masked in masks:
        assert mask == [not masked] * len(tokens)
    rewards = batch["reward"].to_numpy().reshape(4, 6)
    expected = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    trained = ~np.array(is_long)
    advantages = np.array([row[0] for row in batch["advantages"].to_pylist()])
    assert advantages[trained] == pytest.approx(expected.flatten()[trained], abs=1e-6)  # float32
    (step,) = decisions(config, "finished")
    assert step["sampling/overlong_masked"] == sum(is_long)
    assert step["completion/truncated"] == pytest.approx(sum(is_long) / 24)


async def test_remax_gets_the_reward_of_a_greedy_completion(tmp_path: Path):
    def reward(prompt_id: str, token: int) -> float:
        return int(prompt_id[1:]) / 16 if token == GREEDY_TOKEN else float(token % 2)

    config = config_of(runs_dir=tmp_path, advantage={"kind": "remax"})
    async with steps(config, 12, reward) as given:
        batch = (await given.live(0, 1))[0]
        assert sorted(given.replica.answered) == sorted(2 * list(dict.fromkeys(batch["prompt_id"].to_pylist())))
    assert batch.num_rows == 8  # the greedy completions are not among them
    assert all(tokens[0] != GREEDY_TOKEN for tokens in batch["tokens"].to_pylist())
    baselines = [int(prompt_id[1:]) / 16 for prompt_id in batch["prompt_id"].to_pylist()]
    assert batch["baseline"].to_pylist() == baselines
    advantages = [row[0] for row in batch["advantages"].to_pylist()]
    assert advantages == pytest.approx(batch["reward"].to_numpy() - baselines, abs=1e-6)  # float32


async def test_a_prompt_whose_greedy_completion_has_no_score_is_dropped(tmp_path: Path):
    config = config_of(runs_dir=tmp_path, advantage={"kind": "remax"})
    unscored = "p0"
    answer: Callable[[str, int], float | None] = lambda p, token: (  # noqa: E731
        None if p == unscored and token == GREEDY_TOKEN else float(token % 2)
    )
    async with steps(config, 4, answer) as given:
        batch = (await given.live(0, 1))[0]
    assert set(batch["prompt_id"].to_pylist()) == {"p1", "p2", "p3"}


def test_the_budget_has_room_for_what_a_step_begins_with():
    selection = {"dynamic": {"enabled": True, "max_rounds": 1}, "over_sampling": {"factor": 1.5}}
    with pytest.raises(ValueError, match=r"dynamic\.max_rounds 1 must be at least over_sampling\.factor 1\.5"):
        config_of(selection=selection)
    selection["dynamic"]["max_rounds"] = 1.5
    assert config_of(selection=selection).selection.dynamic.max_rounds == 1.5
