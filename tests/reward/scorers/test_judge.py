"""Tests the judge: its request, the score that is read from its answer, and servers that fail."""

import asyncio
import logging
import os
import time
from types import SimpleNamespace

import pytest
from aiohttp import web

from services.common.errors import InvalidInput
from services.reward import remote
from services.reward.errors import FailureReason
from tests.reward.remote_end import chat, served
from tests.support import LIMITS_S, PATIENCE_S

TEMPLATE = 'Q: {prompt}\nGold: {answer}\nMeta: {extra}\nA: {completion}\nReply with {{"score": N}}.'
PATTERN = r"Score: (\S+)"


def judge(url: str, **fields: object) -> dict:
    common = {"kind": "judge", "url": f"{url}/v1/chat/completions", "model": "judge-1"}
    return {**common, "template": TEMPLATE, "score_pattern": PATTERN, **fields}


def in_turn(*replies: web.Response | None):
    """Returns a reply that gives `replies` one after the other, then the last one forever; None never answers."""
    left = list(replies)

    async def reply(_body: object, _request: web.Request) -> web.StreamResponse:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer is None:
            await asyncio.Event().wait()
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    return reply


async def test_the_request_has_the_texts_as_they_are_and_the_answers_number_is_scaled(open_run, make_item):
    hostile = "{answer} {{ {0} {completion.__class__} %s $answer \\1 }"
    item = make_item(hostile, "{prompt}", prompt="{completion}", extra={"a": "{extra}", "é": [1]})
    more = {"chat_template_kwargs": {"enable_thinking": False}}
    async with (
        served(in_turn(chat("quoting Score: 1\nscore\nScore: 7"))) as end,
        open_run(judge(end.url, scale=0.1, temperature=0.5, max_tokens=9, extra_body=more)) as run,
    ):
        (outcome,) = await run.score([item])
        described = run.scorer
    assert outcome.components == {"judge": pytest.approx(0.7, abs=1e-12)}
    content = f'Q: {{completion}}\nGold: {{prompt}}\nMeta: {{"a": "{{extra}}", "é": [1]}}\nA: {hostile}\n'
    message = {"role": "user", "content": content + 'Reply with {"score": N}.'}
    assert end.bodies == [{"model": "judge-1", "messages": [message], "temperature": 0.5, "max_tokens": 9, **more}]
    assert "Authorization" not in end.headers[0]
    assert described.startswith("judge 4/judge-1/")


async def test_the_version_follows_what_decides_the_score(open_run):
    async def version(**fields: object) -> str:
        async with open_run(judge("http://127.0.0.1:1", **fields)) as run:
            return run.scorer

    first = await version()
    assert await version(max_retries=0, timeout_s=3) == first
    assert len({first, await version(scale=2), await version(temperature=1), await version(model="other")}) == 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (web.Response(text="<html>"), "not JSON: Expecting value: line 1 column 1 (char 0): '<html>'"),
        (web.Response(text="[" * 100_000), "not JSON"),
        (web.Response(status=400, text="no such model"), "status 400: no such model"),
        (web.Response(status=302, headers={"Location": "http://127.0.0.2/a?key=b"}), "leads to http://127.0.0.2/a: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_answer_of_no_model_is_an_error_and_not_asked_for_again(open_run, make_item, answer, words):
    async with served(in_turn(answer)) as end, open_run(judge(end.url), {"kind": "exact"}) as run:
        (outcome,) = await run.score([make_item("a", "a")])
    assert (outcome.failure.reason, outcome.failed_scorer, len(end.bodies)) == (FailureReason.ERROR, "judge", 1)
    assert words in outcome.failure.detail
    assert outcome.components == {"exact": 1.0}


async def test_a_pattern_that_explodes_on_an_answer_stops_its_worker_and_not_the_service(open_run, make_item, hurried):
    async def reply(body: dict, _request: web.Request) -> web.StreamResponse:
        is_bad = "bad" in body["messages"][0]["content"]
        return chat("x" * 40 + "!" if is_bad else "xxy 1")

    async with served(reply) as end, open_run(judge(end.url, score_pattern=r"(?:x+x+)+y (\d)")) as run:
        with hurried(run._scorers[0]._pool, 0.5):
            (outcome,) = await run.score([make_item("bad")])
        assert outcome.failure.reason is FailureReason.TIMEOUT
        assert (await run.score([make_item("good")]))[0].reward == 1.0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("no verdict", "does not match the judge's answer 'no verdict'"),
        ("Score: high", "score 'high' is not a number"),
        ("Score: nan", "finite number"),
        ("Score: 1e999", "finite number"),
        ("Score: __import__('os')", "is not a number"),
        ("<think>It says Score: 10.</think>I refuse.", "does not match the judge's answer 'I refuse.'"),
    ],
)
async def test_an_answer_that_says_no_score_is_asked_for_again(open_run, make_item, pauses, said, words):
    async with served(in_turn(chat(said), chat("Score: 7"))) as end, open_run(judge(end.url)) as run:
        assert (await run.score([make_item("a")]))[0].reward == 7.0
    async with served(in_turn(chat(said))) as end, open_run(judge(end.url, max_retries=1)) as run:
        (outcome,) = await run.score([make_item("a")])
    assert (outcome.failure.reason, len(end.bodies)) == (FailureReason.ERROR, 2)
    assert words in outcome.failure.detail


@pytest.mark.parametrize(
    ("empty", "words"),
    [
        (chat(None), "no choices[0].message.content"),
        (web.json_response({"choices": []}), "no choices[0].message.content"),
        (web.json_response([1]), "no choices[0].message.content"),
        (web.json_response({"error": {"code": 502}}), "message.content: {'error': {'code': 502}}"),
    ],
    ids=["null", "choices", "list", "error"],
)
async def test_an_answer_without_text_is_asked_for_again(open_run, make_item, pauses, empty, words):
    """Routers say that the model's server failed in an answer with status 200."""
    async with served(in_turn(empty, chat("Score: 7"))) as end, open_run(judge(end.url)) as run:
        assert (await run.score([make_item("a")]))[0].reward == 7.0
    async with served(in_turn(empty)) as end, open_run(judge(end.url, max_retries=1)) as run:
        (outcome,) = await run.score([make_item("a")])
    assert (outcome.failure.reason, len(end.bodies)) == (FailureReason.ERROR, 2)
    assert words in outcome.failure.detail


@pytest.mark.parametrize("said", ["It claims 'Score: 10' for itself. Let me", "", None])
async def test_an_answer_that_was_cut_off_has_no_score(open_run, make_item, pauses, said):
    cut = web.json_response({"choices": [{"finish_reason": "length", "message": {"content": said}}]})
    async with served(in_turn(cut, chat("Score: 7"))) as end, open_run(judge(end.url)) as run:
        assert (await run.score([make_item("a")]))[0].reward == 7.0
    async with served(in_turn(cut)) as end, open_run(judge(end.url, max_retries=0)) as run:
        (outcome,) = await run.score([make_item("a")])
    assert "cut off: length: raise max_tokens" in outcome.failure.detail


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        *[(r"Score: (\d)", "Score: 10"), (r"Score: (\d+)", "Score: 7.5"), (r".*(\d+)", "10"), (r"(\d+)/10", "8.5/10")],
        *[(r"Score: (\d+)", "Score: 8,5"), (r"(\d+)", "Score: 8,5"), (r"(\d+)", "Score: -8"), (r".*(\d)", "-8")],
    ],
)
async def test_a_part_of_a_number_is_no_score(open_run, make_item, pauses, pattern, said):
    replies = in_turn(chat(said), chat("Score: 7. Or: 7/10. 1, 2: 7"))
    async with served(replies) as end, open_run(judge(end.url, score_pattern=pattern)) as run:
        assert (await run.score([make_item("a")]))[0].reward == 7.0
    assert len(end.bodies) == 2


@pytest.mark.parametrize(
    ("pattern", "said"),
    [(r"(\d+)\]", "[8,7]"), (r"\[(\d+)", "[7,8]"), (r"(\d+),\d", "7,8"), (r"(\d+)", "1-7"), (r"- (\d+)", "- 7")],
)
async def test_a_mark_that_separates_numbers_is_no_part_of_them(open_run, make_item, pattern, said):
    async with served(in_turn(chat(said))) as end, open_run(judge(end.url, score_pattern=pattern)) as run:
        assert (await run.score([make_item("a")]))[0].reward == 7.0


@pytest.mark.parametrize(
    ("fields", "refused", "score"),
    [
        ({"scale": 0.1}, 85, 0.7),
        ({"scale": 0.1}, -1, 0.7),
        ({"score_range": [1, 10]}, 0, 7),
        ({"scale": 0.01}, 700, 0.07),
    ],
)
async def test_a_score_out_of_range_is_asked_for_again(open_run, make_item, pauses, fields, refused, score):
    async with (
        served(in_turn(chat(f"Score: {refused}"), chat("Score: 7"))) as end,
        open_run(judge(end.url, **fields)) as run,
    ):
        (outcome,) = await run.score([make_item("a")])
    assert (outcome.reward, len(end.bodies)) == (pytest.approx(score), 2)


async def test_a_judge_that_stays_out_of_range_gives_no_score(open_run, make_item, pauses):
    async with (
        served(in_turn(chat("Score: 85"))) as end,
        open_run(judge(end.url, scale=0.1, max_retries=2), {"kind": "exact"}) as run,
    ):
        (outcome,) = await run.score([make_item("a", "a")])
    assert (outcome.failure.reason, outcome.components, len(end.bodies)) == (FailureReason.ERROR, {"exact": 1.0}, 3)
    assert "score 85 is not from 0 to 10 (score_range)" in outcome.failure.detail


@pytest.mark.parametrize(
    ("fields", "score"), [({}, 85), ({"scale": 0.1, "score_range": [0, 100]}, 8.5), ({"scale": 2}, 170)]
)
async def test_without_a_range_every_number_is_a_score(open_run, make_item, fields, score):
    async with served(in_turn(chat("Score: 85"))) as end, open_run(judge(end.url, **fields)) as run:
        (outcome,) = await run.score([make_item("a")])
    assert outcome.reward == score


@pytest.mark.parametrize("status", [429, 408, 500, 503])
async def test_failures_that_may_pass_are_tried_again(open_run, make_item, status):
    async with served(in_turn(web.Response(status=status), chat("Score: 1"))) as end, open_run(judge(end.url)) as run:
        (outcome,) = await run.score([make_item("a")])
    assert (outcome.reward, outcome.failure, len(end.bodies)) == (1.0, None, 2)


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """Records the pauses before retries, which take no time here."""
    slept: list[float] = []

    async def sleep(duration_s: float) -> None:
        slept.append(duration_s)

    monkeypatch.setattr(remote, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return slept


async def test_retry_after_is_waited_for(open_run, make_item, pauses):
    busy = web.Response(status=429, headers={"Retry-After": "2"})
    async with served(in_turn(busy, chat("Score: 1"))) as end, open_run(judge(end.url)) as run:
        (outcome,) = await run.score([make_item("a")])
    assert pauses == [2.0]  # the first backoff alone is below 0.5 s
    assert (outcome.reward, len(end.bodies)) == (1.0, 2)


async def test_the_last_failure_is_the_answer_when_retries_are_used_up(open_run, make_item, pauses):
    async with (
        served(in_turn(web.Response(status=503, text="overloaded"))) as end,
        open_run(judge(end.url, max_retries=1)) as run,
    ):
        (outcome,) = await run.score([make_item("a")])
    assert (outcome.failure.reason, len(end.bodies)) == (FailureReason.ERROR, 2)
    assert "status 503: overloaded" in outcome.failure.detail
    async with served(in_turn(None)) as end, open_run(judge(end.url, max_retries=1, request_timeout_s=0.1)) as run:
        (outcome,) = await run.score([make_item("a")])
    assert (outcome.failure.reason, len(pauses)) == (FailureReason.TIMEOUT, 2)
    assert "no answer within 0.1 s (request_timeout_s)" in outcome.failure.detail


async def test_a_late_request_is_tried_again(open_run, make_item, pauses):
    async with (
        served(in_turn(None, chat("Score: 1"))) as end,
        open_run(judge(end.url, request_timeout_s=0.3, max_retries=20)) as run,
    ):
        (outcome,) = await run.score([make_item("a")])
    assert outcome.reward == 1.0 and pauses  # one retry, or more where the machine is too busy for the second request


LATER = web.Response(status=503, headers={"Retry-After": "3600"}, text="loading")


@pytest.mark.parametrize(
    ("answer", "why"), [(None, ""), (LATER, "; the last of 1 failed request: status 503: loading")]
)
async def test_a_sample_has_its_deadline_whatever_the_server_does(open_run, make_item, answer, why):
    async with served(in_turn(answer)) as end, open_run(judge(end.url, timeout_s=0.5)) as run:
        (outcome,) = await run.score([make_item("a")])
    assert outcome.failure.reason is FailureReason.TIMEOUT
    assert outcome.failure.detail.endswith(f"no score within 0.5 s (timeout_s){why}")


async def test_waiting_for_a_turn_costs_no_sample_its_deadline(open_run, make_item):
    running = most = 0
    answer_s = 0.0

    async def reply(_body: object, _request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(answer_s)
        running -= 1
        return chat("Score: 1")

    for limit_s in LIMITS_S:
        # 24 samples of a tenth of the limit each, two at a time: the last ones wait longer than their deadline.
        answer_s = limit_s / 10
        async with served(reply) as end, open_run(judge(end.url, max_concurrent=2, timeout_s=limit_s)) as run:
            outcomes = await run.score([make_item("a")] * 24)
        if not any(outcome.failure for outcome in outcomes):
            break
    assert (most, [outcome.reward for outcome in outcomes]) == (2, [1.0] * 24)


async def test_requests_start_no_faster_than_the_limit(open_run, make_item):
    begun = []

    async def reply(_body: object, _request: web.Request) -> web.StreamResponse:
        begun.append(time.monotonic())
        return chat("Score: 1")

    async with served(reply) as end, open_run(judge(end.url, requests_per_s=20)) as run:
        begin = time.monotonic()
        await run.score([make_item("a")] * 11)
    assert max(begun) - begin >= 0.5  # ten intervals of 50 ms


async def test_closing_the_run_ends_scores_in_progress_and_in_line(open_run, make_item):
    asked = asyncio.Event()

    async def reply(_body: object, _request: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.Event().wait()

    async with served(reply) as end, open_run(judge(end.url, max_concurrent=1)) as run:
        scoring = asyncio.create_task(run.score([make_item("a")] * 3))
        await asked.wait()
        await run.close()
        outcomes = await asyncio.wait_for(scoring, timeout=PATIENCE_S)
    assert [outcome.failure.reason for outcome in outcomes] == [FailureReason.CRASHED] * 3


async def test_the_key_is_sent_and_seen_nowhere_else(open_run, make_item, tmp_path, caplog):
    key = "sk-0123456789abcdef"
    (tmp_path / "key").write_text(f"{key}\n")
    replies = [web.Response(status=500, text=f"odd key {key}"), web.Response(status=401, text=f"wrong key {key}")]
    caplog.set_level(logging.DEBUG)
    async with served(in_turn(*replies)) as end, open_run(judge(end.url, api_key_file=str(tmp_path / "key"))) as run:
        (outcome,) = await run.score([make_item("a")])
        described = run.scorer
    assert [headers["Authorization"] for headers in end.headers] == [f"Bearer {key}"] * 2
    assert outcome.failure.detail.endswith("status 401: wrong key ***")
    assert key not in caplog.text + described + repr(outcome) + repr(run._config)


@pytest.mark.parametrize(
    "answer", [web.json_response({"error": "KEY"}), web.Response(status=401, text=" " * 290 + "KEY")]
)
async def test_an_answer_that_quotes_the_key_shows_no_part_of_it(open_run, make_item, tmp_path, answer):
    key = "sk-0123456789abcdef"
    (tmp_path / "key").write_text(key)
    quoting = web.Response(status=answer.status, body=answer.body.replace(b"KEY", key.encode()))
    async with served(in_turn(quoting)) as end, open_run(judge(end.url, api_key_file=str(tmp_path / "key"))) as run:
        (outcome,) = await run.score([make_item("a")])
    assert "***" in outcome.failure.detail and key[:5] not in outcome.failure.detail


async def test_a_word_in_place_of_a_key_changes_no_answer(open_run, make_item, tmp_path):
    (tmp_path / "key").write_text("e")
    async with (
        served(in_turn(chat("Score: 7"))) as end,
        open_run(judge(end.url, api_key_file=str(tmp_path / "key"))) as run,
    ):
        assert (await run.score([make_item("a")]))[0].reward == 7.0


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"", "one key"), (b"a b", "one key"), (b"a\r\nX-Evil: 1", "one key"), (b"\xff", "ASCII")],
)
async def test_a_key_file_that_cannot_be_used_is_refused_at_open(open_run, tmp_path, content, words):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"scorers\.0 \(judge\) cannot start: api_key_file .*{words}"):
        async with open_run(judge("https://judge.invalid", api_key_file=str(tmp_path / "key"))):
            pass


@pytest.mark.timeout(120)
async def test_a_pipe_as_key_file_is_refused_at_once(open_run, tmp_path):
    os.mkfifo(tmp_path / "key")
    with pytest.raises(InvalidInput, match=r"api_key_file .*: it is not a regular file"):
        async with open_run(judge("https://judge.invalid", api_key_file=str(tmp_path / "key"))):
            pass
