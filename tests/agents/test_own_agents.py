"""Tests agents as users write them, and worse, in workers of a real reward service: own_agents.py says what they do."""

import asyncio
import json

import pytest

from services.reward.agents import endpoint
from services.reward.environments import executor
from tests.agents import own_agents
from tests.agents.harness import Stage, staged, table_of
from tests.agents.own_agents import Json
from tests.agents.test_episodes import everything_sampled_is_trained_once, says
from tests.support import PATIENCE_S

_RAW = {"pipelined": [200, 200, 200], **{name: [200] for name in ("in drops", "whole URL", "half a pair")}}
_RAW |= {"gzip": [415], "bomb": [415], "deep": [400], "no role": [400]}


async def played(stage: Stage, name: str) -> tuple[list[list[int]], str]:
    """Returns the calls of each row, as numbers, and the final text. What was sampled is trained once."""
    stage.engine.log.clear()
    group = await stage.play(name)
    assert group is not None and group.left[0]
    rows = table_of(group).to_pylist()
    everything_sampled_is_trained_once(stage, rows)
    return [[call["number"] for call in row["calls"]] for row in rows], group.left[0].text


async def test_agents_of_users_train_what_they_sample_and_hurt_nothing(caplog: pytest.LogCaptureFixture):
    async with staged(says, path=f"{own_agents.__name__}:run", num_workers=1) as stage:

        async def slow(text: str) -> None:
            await asyncio.sleep(1.2 if "slow" in text else 0)

        stage.engine.delay = slow
        rows, _ = await played(stage, "edits")
        assert rows == [[0, 1, 2], [0, 6], [3], [4], [5], [7], [8]]
        rows, _ = await played(stage, "special")
        assert rows == [[0, 1], [2]]
        tokens = [stage.engine.tokenizer.encode(text)[0] for text in ("<|im_start|>", "<|endoftext|>")]
        counts = [[prompt.count(token) for token in tokens] for prompt, _ in stage.engine.log]
        assert counts == [[3, 0], [5, 0], [5, 0]], "one begin for each message and the answer"
        stage.collector.take_metrics()
        rows, _ = await played(stage, "impatient")
        assert rows == [[0, 1]] and stage.collector.take_metrics()["environment/retries"] >= 2
        rows, _ = await played(stage, "team")
        assert sorted(map(len, rows)) == [2] * 7
        rows, _ = await played(stage, "leaves")
        assert rows == [[0], [1]], "whether a call is trained does not depend on its fate"
        _, text = await played(stage, "raw")
        assert json.loads(text) == _RAW
    errors = [record for record in caplog.records if record.name == endpoint.__name__]
    assert not errors, "an agent that leaves or sends nonsense is no error of the service"


def _wrapped(row: Json, seed: int, url: str, key: str) -> object:
    """Returns what an async function in a decorator returns: a coroutine."""
    return _AsyncObject()(row, seed, url, key)


class _AsyncObject:
    async def __call__(self, row: Json, seed: int, url: str, key: str) -> str:
        return row["prompt"]


@pytest.mark.parametrize("agent", [_wrapped, _AsyncObject(), _AsyncObject().__call__, lambda **fields: "4"])
async def test_what_an_agent_returns_is_awaited_if_it_is_async(agent: object):
    assert await executor._call_function(agent, {"row": {"prompt": "4"}, "seed": 0, "url": "", "key": ""}) == "4"


async def test_an_agent_that_looks_for_another_item_in_vain_ends():
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="the function raised StopIteration"):
            await executor._call_function(lambda: next(iter(())), {})
