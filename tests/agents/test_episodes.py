"""Tests whole episodes of agents: what is trained, retries, limits and failures, with a scripted engine."""

import asyncio
import json
import logging
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lockstep.reward.v1.agent_pb2 import AgentCall, CallAnswer
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.advantage import AdvantageConfig
from services.common.config.rollout import SamplingConfig
from services.common.errors import PreconditionFailed, Reason
from services.coordinator.clients.environment import EpisodeFailed
from services.coordinator.rl.advantages import compute_advantages
from services.coordinator.rl.sampling import agents, collect
from services.reward.agents.dialect import Request
from services.reward.agents.endpoint import Line
from tests.agents.harness import Stage, staged, table_of, trained
from tests.agents.in_process import TOKENIZER, Ask, Engine, Speaker, caught, play
from tests.support import until

AGENTS = "tests.agents.user_agents"
# Not canonical: 5000.0, an escape that need not be one, and white space.
CALL = '<tool_call>\n{"name": "add", "arguments":  {"b": 5000.0, "a": "\\u0041\\/"}}\n</tool_call>'


def says(text: str, seed: int) -> str:
    """Calls the tool once, and says what depends only on the seed."""
    if "<tools>" in text and "tool_response" not in text.rpartition("</tools>")[2]:
        return f"I add.\n{CALL}"
    return f"answer {seed % 1000}"


def everything_sampled_is_trained_once(stage: Stage, rows: list[dict[str, Any]]) -> None:
    log = Counter(tuple(answer) for _, answer in stage.engine.log)
    assert Counter(tuple(turn) for row in rows for turn in trained(row)) == log
    prompts = dict(stage.engine.log)
    for row in rows:
        for begin, end in zip(row["turn_begins"], row["turn_ends"], strict=True):
            prompt = (*row["prompt_tokens"], *row["tokens"][:begin])
            assert prompts[prompt] == tuple(row["tokens"][begin:end]) or len(prompts) < len(stage.engine.log)


async def test_tools_compaction_edits_and_sub_agents_make_segments_of_one_episode():
    async with staged(says, path=f"{AGENTS}:compacts") as stage:
        group = await stage.play("add", num_samples=2)
        assert group is not None
        rows = table_of(group).to_pylist()
        everything_sampled_is_trained_once(stage, rows)
        assert [(row["sample"], row["segment"]) for row in rows] == [(s, k) for s in range(2) for k in range(5)]
        assert [len(row["turn_begins"]) for row in rows[:5]] == [3, 1, 1, 1, 1]
        assert {row["reward"] for row in rows} == {1.0}
        assert [call["parent"] for call in rows[0]["calls"]] == [None, 0, 1]
        numbers = [call["number"] for row in rows[:5] for call in row["calls"]]
        assert sorted(numbers) == list(range(7))
        metrics = stage.collector.take_metrics()
        assert metrics["environment/retries"] == 0
    async with staged(says, path=f"{AGENTS}:compacts") as stage:
        again = await stage.play("add", num_samples=2)
        assert again is not None and table_of(again).equals(table_of(group)), "seeds follow from the calls alone"


async def test_parallel_calls_give_the_same_rows_in_any_order_of_arrival():
    tables = []
    for question in ("a b", "b a"):
        async with staged(says, path=f"{AGENTS}:parallel") as stage:
            both = asyncio.Barrier(2)  # no answer before both calls have come

            async def waits(text: str, both: asyncio.Barrier = both) -> None:
                if "branch" in text:
                    await both.wait()

            stage.engine.delay = waits
            group = await stage.play(question)
            assert group is not None
            rows = table_of(group).to_pylist()
            everything_sampled_is_trained_once(stage, rows)
            assert [row["segment"] for row in rows] == [0, 1]
            first = rows[1]["turn_ends"][0]
            assert not any(rows[1]["loss_mask"][:first]) and rows[1]["tokens"][:first] == rows[0]["tokens"][:first]
            tables.append(table_of(group).drop_columns(["calls"]))
    assert tables[0].equals(tables[1])


async def test_a_retry_is_one_call_until_its_answer_was_delivered(caplog: pytest.LogCaptureFixture):
    async with staged(says, path=f"{AGENTS}:retries") as stage:
        waiting = asyncio.Event()
        line = stage.servicer.agents

        async def until_repeated(text: str) -> None:
            while not any(line.num_retries >= 2 for line in line._endpoint._lines.values()):  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            waiting.set()

        stage.engine.delay = until_repeated
        rows = await stage.rows()
        assert rows[0]["reward"] == 1.0
        assert len(stage.engine.log) == 2, "three requests at once were one call, the one after its answer another"
        everything_sampled_is_trained_once(stage, rows)
        assert stage.collector.take_metrics()["environment/retries"] == 2
        assert "prompt p0 sample 0: 2 requests repeated one in progress and got its answer" in caplog.text


async def test_what_would_change_the_distribution_is_refused_by_name():
    async with staged(says, path=f"{AGENTS}:refused") as stage:
        group = await stage.play()
        assert group is not None and group.left[0]
        said = json.loads(group.left[0].text)
        named = [None, None, "messages", "messages", "messages[0].content", "n", "response_format", "tool_choice"]
        named += ["logit_bias", "top_logprobs", "parallel_tool_calls", "unknown", "web_search_options", "tools"]
        named += ["max_tokens", "stop"]
        assert said == [*([400, name] for name in named), [404, "path"], [413, "size"], [401, "key"]]
        (_, answer), (row,) = stage.engine.log[-1], table_of(group).to_pylist()
        assert len(answer) == 3 and row["finish_reason"] == "stop", "a lower limit of the agent cuts no episode off"
        assert len(stage.engine.log) == 1, "nothing that was refused has reached the engine"
        num_refused = stage.collector.take_metrics()["environment/refused_calls"]
        assert num_refused == len(said) - 1, "all but the one with a key of no episode"


async def test_stop_strings_are_refused_where_the_engine_would_not_return_what_is_trained(
    caplog: pytest.LogCaptureFixture,
):
    async with staged(says, path=f"{AGENTS}:stops") as stage:
        stage.collector._rollout.replicas[0].returns_routed_experts = True
        for keep_failed, text in ((False, "trainer.moe.router_replay"), (True, "200 ")):
            group = await stage.play(keep_failed=keep_failed)
            assert group is not None and group.left[0] and text in group.left[0].text, "the run goes on"
        (line,) = [message for message in caplog.messages if "the endpoint refused 1 request of the agent" in message]
        assert "trainer.moe.router_replay" in line
        stage.sampling = SamplingConfig(max_tokens=200, top_k=50)
        with pytest.raises(EpisodeFailed, match=r"rollout\.sampling\.top_k"):
            await stage.play("gives up")
        assert len(stage.engine.log) == 3, "no call with stop strings has reached the engine in training"


@pytest.mark.parametrize(
    ("limit", "finish_reason", "num_calls"),
    [
        pytest.param({"max_calls": 4}, "turn_limit", 4, marks=pytest.mark.long),
        ({"max_tokens": 30}, "length", None),
        ({"max_segments": 3}, "turn_limit", 3),
    ],
)
async def test_a_limit_ends_the_episode_as_an_outcome(limit: dict[str, int], finish_reason: str, num_calls: int | None):
    async with staged(says, path=f"{AGENTS}:floods", **limit) as stage:
        group = await stage.play()
        assert group is not None and group.left[0]
        rows = table_of(group).to_pylist()
        everything_sampled_is_trained_once(stage, rows)
        assert {row["finish_reason"] for row in rows} == {finish_reason} and {row["reward"] for row in rows} == {0.0}
        assert num_calls is None or len(stage.engine.log) == num_calls
        assert sum(len(answer) for _, answer in stage.engine.log) <= limit.get("max_tokens", 10**9)


@pytest.mark.parametrize("dialect", ["messages", "chat"])
async def test_an_answer_that_the_run_cuts_is_cut_whatever_the_agent_allows(dialect: str):
    async def agent(speaker: Speaker, ask: Ask) -> None:
        await ask([{"role": "user", "content": "Q"}])

    (row,) = await play(agent, Engine(lambda: TOKENIZER.encode("x" * 4000), random.Random(0)), dialect)
    assert (len(row["tokens"]), row["finish_reason"]) == (200, "length"), "Anthropic's client allows 4000 tokens"


async def test_a_refusal_after_an_answer_that_was_cut_off_leaves_the_episode_cut_off():
    async def agent(speaker: Speaker, ask: Ask) -> None:
        await ask([{"role": "user", "content": "Q"}])
        with pytest.raises(AssertionError, match="the episode is over"):
            await ask([{"role": "user", "content": "Go on."}])

    for answer, reason in (("x" * 4000, "length"), ("4<|im_end|>", "turn_limit")):
        engine = Engine(lambda answer=answer: TOKENIZER.encode(answer), random.Random(0))
        (row,) = await play(agent, engine, "chat", max_calls=1)
        assert row["finish_reason"] == reason


async def test_an_agent_that_ignores_the_end_is_ended_and_scored():
    async with staged(says, path=f"{AGENTS}:floods", max_calls=2, grace_s=0.2) as stage:
        group = await stage.play("forever")
        assert group is not None and group.left[0]
        assert (group.left[0].exit_code, group.scores[0].reward) == (-9, 0.0)


@pytest.mark.parametrize(("question", "reason"), [("stops", None), ("recovers", "stop")])
async def test_an_overflow_is_told_and_an_agent_that_recovers_goes_on(question: str, reason: str | None):
    async with staged(says, path=f"{AGENTS}:too_long") as stage:
        if reason is None:  # it has sampled nothing, so there is nothing to train
            told = r"maximum context length is \d+ tokens, and the prompt alone has \d+ \(rollout\.max_model_len\)"
            with pytest.raises(EpisodeFailed, match=rf"no answer of the model \(1 call refused, .*: .* {told}\)"):
                await stage.play(question)
            return
        group = await stage.play(question)
        assert group is not None and group.left[0]
        assert group.left[0].text == "400 context_length_exceeded"
        assert [row["finish_reason"] for row in table_of(group).to_pylist()] == [reason]


async def test_an_agent_that_overflows_again_and_again_reaches_the_limit_of_calls():
    async with staged(says, path=f"{AGENTS}:overflows", max_calls=3, episode_s=50) as stage:
        group = await stage.play()
        assert group is not None and group.left[0]
        assert group.left[0].text == "context_length_exceeded context_length_exceeded episode_over"
        assert [row["finish_reason"] for row in table_of(group).to_pylist()] == ["turn_limit"]


@pytest.mark.parametrize(
    ("question", "limit", "reason"),
    [
        ("go on", {"max_calls": 2}, "turn_limit"),
        ("at once", {"max_segments": 3}, "turn_limit"),
        pytest.param("go on", {"max_tokens": 8}, "length", marks=pytest.mark.long),
        ("too long", {}, "length"),
        pytest.param("at once", {"max_calls": 3}, "turn_limit", marks=pytest.mark.long),
    ],
)
async def test_an_agent_that_does_not_catch_the_refusal_at_a_limit_has_an_outcome(
    question: str, limit: dict[str, int], reason: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    async with staged(says, path=f"{AGENTS}:ends_with_a_refusal", **limit) as stage:
        group = await stage.play(question)
        assert group is not None and group.left[0]
        assert (group.left[0].text, group.left[0].exit_code) == ("", 1)
        rows = table_of(group).to_pylist()
        everything_sampled_is_trained_once(stage, rows)
        assert {row["finish_reason"] for row in rows} == {reason}
        assert not any("failed" in name for name in stage.collector.take_metrics())
    named = [f"environment.{key} ({most})" for key, most in limit.items()] or ["4096 tokens"]
    (line,) = [one for one in caplog.records if one.getMessage().startswith("episode p0/0/")]
    assert named[0] in line.getMessage() and "\n" not in line.getMessage() and line.levelno == logging.INFO


async def test_prompts_that_are_too_long_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture):
    async with staged(says, path=f"{AGENTS}:too_long") as stage:
        for number in range(3):
            assert await stage.play("recovers" + " again" * number)
    (line,) = [message for message in caplog.messages if "the endpoint refused 1 request of the agent" in message]
    assert "rollout.max_model_len" in line


@pytest.mark.parametrize(("agent", "why"), [("crashes", "a bug of the agent"), ("silent", "never called the model")])
async def test_a_failure_of_the_agent_is_never_a_reward(agent: str, why: str):
    async with staged(says, path=f"{AGENTS}:{agent}", max_retries=1) as stage:
        with pytest.raises(EpisodeFailed, match=why):
            await stage.play()
        failed = {name: n for name, n in stage.collector.take_metrics().items() if "failed" in name}
        assert list(failed.values()) == [2.0], "played again once"
        kept = [*stage.collector.config.run_dir.glob("failed_episodes/*.jsonl")]
        assert len(kept) == (2 if agent == "crashes" else 0), "one that made no call has nothing to show"
        group = await stage.play(keep_failed=True)
        assert group is not None and group.scores[0].HasField("failure"), "an evaluation keeps it without a reward"


async def test_the_calls_before_a_failure_are_kept(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collect, "_MOST_KEPT", 2)
    async with staged(says, path=f"{AGENTS}:crashes_later") as stage:
        folder, written = stage.collector.config.run_dir / "failed_episodes", []
        for number in range(3):
            with pytest.raises(EpisodeFailed, match="RuntimeError: after some calls") as failure:
                await stage.play()
            written.append(failure.value.message.partition(": its calls are in ")[2])
            assert failure.value.message in caplog.text and len([*folder.iterdir()]) == min(number + 1, 2)
        assert all(written[:2]) and not written[2]
        first, *calls = map(json.loads, Path(written[0]).read_text().splitlines())
    assert first["failure"] == "crashed"
    assert re.fullmatch(r"RuntimeError: after some calls \(user_agents\.py, line \d+\)", first["detail"])
    said = [[message["content"] for message in call["messages"]] for call in calls]
    assert said == [["\u00e4"], ["go on"], [], ["x"]], "a call has what it adds to the one before"
    assert [call["status"] for call in calls] == ["stop", "stop", "context_length_exceeded", "stop"]
    assert [call.get("answer", {}).get("role") for call in calls] == ["assistant", "assistant", None, "assistant"]


async def test_an_answer_that_is_delivered_late_ends_no_later_call():
    asked: list[int] = []

    async def ask(call: AgentCall) -> CallAnswer:
        asked.append(call.number)
        return CallAnswer(call=call.number)

    line, request = Line(ask, "key", 64), (Request({}), ("/v1/chat/completions", "body"), lambda: True)
    first, retried = await asyncio.gather(line.answer(*request), line.answer(*request))
    line.delivered(first)
    second = await line.answer(*request)
    line.delivered(retried)
    assert await line.answer(*request) is second and asked == [0, 1]


async def test_requests_that_the_endpoint_refuses_are_counted_and_named(caplog: pytest.LogCaptureFixture):
    async with staged(says, path=f"{AGENTS}:asks_for_what_is_refused", max_retries=0) as stage:
        assert await stage.play("and goes on") is not None
        assert stage.collector.take_metrics()["environment/refused_calls"] == 2
        (line,) = [message for message in caplog.messages if "the endpoint refused 2 requests" in message]
        assert "the last because: n: 2 is not supported" in line
        with pytest.raises(EpisodeFailed, match="got 2 requests refused by the endpoint, because: n: 2"):
            await stage.play("and gives up")
        with pytest.raises(EpisodeFailed, match="got 1 request refused by the endpoint, because: POST /chat/comp"):
            await stage.play("elsewhere")


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("Q", r"\(environment\.episode_s\): its calls are in"),
        ("refused", "refused 1 request, .*: tool_choice: .*drop_fields"),
    ],
)
async def test_an_episode_that_takes_too_long_fails_with_the_last_refusal_and_leaves_nothing(question: str, why: str):
    async with staged(says, path=f"{AGENTS}:sleeps", episode_s=1.0) as stage:
        with pytest.raises(EpisodeFailed, match=why):
            await stage.play(question)
        service = stage.servicer.agents
        await until(lambda: not service._endpoint._lines and not service._playing)  # type: ignore[union-attr]


@pytest.mark.parametrize("mutant", ["", "the stamp of an answer is not compared"])
async def test_new_weights_in_mid_episode_leave_nothing_of_it_to_train(mutant: str, monkeypatch: pytest.MonkeyPatch):
    if mutant:
        monkeypatch.setattr(agents, "require_stamp", lambda *_: None)
    async with staged(says, path=f"{AGENTS}:compacts") as stage:

        async def commits(text: str) -> None:
            if len(stage.engine.log) == 2:
                await stage.collector._rollout.replicas[0].commit(PolicyStamp(version=3, digest="e" * 32))

        stage.engine.delay, group, reason = commits, None, Reason.STALE_STAMP
        with caught(mutant):
            try:
                group = await stage.play("add")
            except PreconditionFailed as error:
                reason = error.reason
            assert group is None and reason is Reason.STALE_STAMP
            assert len(stage.engine.log) == 3, "and the agent was ended at once"
        await until(lambda: not stage.servicer.agents._playing)


async def test_every_token_of_an_episode_has_its_advantage():
    async with staged(says, path=f"{AGENTS}:compacts") as stage:
        group = await stage.play("add", num_samples=2)
        assert group is not None
        group.scores[1].reward = 0.0
        batch = compute_advantages(table_of(group), AdvantageConfig(kind="dr_grpo"))
        for row in batch.to_pylist():
            expected = 0.5 if row["sample"] == 0 else -0.5
            assert row["advantages"] == [expected if trained else 0.0 for trained in row["loss_mask"]]
