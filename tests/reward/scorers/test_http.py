"""Tests the contract with a remote scorer, and the errors if the server breaks it."""

import asyncio
import gzip
import json

import pytest
from aiohttp import web
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.types.v1 import types_pb2

from services.common.errors import InvalidInput, Reason
from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.reward.errors import FailureReason
from services.reward.remote import MAX_RESPONSE_BYTES
from services.reward.servicer import RewardServicer
from tests.reward.remote_end import served
from tests.support import LIMITS_S, PATIENCE_S, raises


def http(url: str, **fields: object) -> dict:
    return {"kind": "http", "url": f"{url}/score", **fields}


async def lengths(body: dict, _request: web.Request) -> web.Response:
    """Answers as a good scorer does: with the length of each completion, or an error for an empty one."""
    scores = [len(sample["completion"]) or {"error": "empty"} for sample in body["samples"]]
    return web.json_response({"scores": scores, "version": "lengths 1"})


def after_open(answer: web.Response):
    """Returns a reply that scores the empty group at the start, and then answers everything with `answer`."""

    async def reply(body: dict, request: web.Request) -> web.StreamResponse:
        if not body["samples"]:
            return await lengths(body, request)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    return reply


async def test_a_group_is_one_request_with_every_field(open_run, make_item):
    items = [make_item("abc", "4", extra={"level": 3}), make_item("", "4"), make_item("{}", finish_reason="length")]
    async with served(lengths) as end, open_run(http(end.url, weight=2), {"kind": "exact"}) as run:
        outcomes = await run.score(items)
        assert run.scorer == "http lengths 1 x 2 + exact 2 x 1"
    assert [outcome.components for outcome in outcomes] == [
        {"http": 3.0, "exact": 0.0}, {"exact": 0.0}, {"http": 2.0, "exact": 0.0},
    ]  # fmt: skip
    assert [outcome.reward for outcome in outcomes] == [6.0, 0.0, 4.0]
    assert (outcomes[1].failure.reason, outcomes[1].failure.detail) == (FailureReason.ERROR, "empty")
    assert [len(body["samples"]) for body in end.bodies] == [0, 3]
    assert end.bodies[1]["samples"][0] == {
        "prompt": "p", "answer": "4", "extra": {"level": 3}, "completion": "abc", "num_tokens": 7,
        "finish_reason": "stop",
    }  # fmt: skip
    assert end.headers[1]["Content-Type"] == "application/json"


GOOD = {"scores": [1, 1], "version": "lengths 1"}
BROKEN = [
    ([1, 1], "only the keys scores and version"),
    ({"scores": [1, 1]}, "only the keys scores and version"),
    (GOOD | {"more": 1}, "only the keys scores and version"),
    (GOOD | {"version": ""}, "printable"),
    (GOOD | {"version": "a\nb"}, "printable"),
    (GOOD | {"version": 1}, "printable"),
    (GOOD | {"version": "lengths 2"}, "changed from lengths 1 to lengths 2"),
    (GOOD | {"scores": [1]}, "a list of 2"),
    (GOOD | {"scores": [1, 1, 1]}, "a list of 2"),
    (GOOD | {"scores": {"0": 1, "1": 1}}, "a list of 2"),
    (GOOD | {"scores": [1, "1"]}, "finite number"),
    (GOOD | {"scores": [1, None]}, "finite number"),
    (GOOD | {"scores": [1, True]}, "finite number"),
    (GOOD | {"scores": [1, [1]]}, "finite number"),
    (GOOD | {"scores": [1, float("nan")]}, "finite number"),
    (GOOD | {"scores": [1, float("inf")]}, "finite number"),
    (GOOD | {"scores": [1, 10**400]}, "finite number"),
    (GOOD | {"scores": [1, {"error": 5}]}, "finite number"),
    (GOOD | {"scores": [1, {"error": "x", "score": 1}]}, "finite number"),
]


@pytest.mark.parametrize(("answer", "words"), BROKEN)
async def test_a_broken_answer_fails_the_group(open_run, make_item, answer, words):
    async with served(after_open(web.Response(text=json.dumps(answer)))) as end, open_run(http(end.url)) as run:
        outcomes = await run.score([make_item("a"), make_item("b")])
    assert [outcome.failure.reason for outcome in outcomes] == [FailureReason.ERROR] * 2
    assert words in outcomes[0].failure.detail
    assert len(end.bodies) == 2


BOMB = gzip.compress(b" " * (64 << 20) + b"1")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (web.Response(body=b" " * (MAX_RESPONSE_BYTES + 1)), "more than 4194304 bytes"),
        (web.Response(body=BOMB, headers={"Content-Encoding": "gzip"}), "not JSON: compressed (gzip)"),
        (web.Response(body=b"1" * 5000), "not JSON"),
        (web.Response(body=b"\xff"), "not JSON"),
        (web.Response(status=302, headers={"Location": "http://127.0.0.2:1/"}), "status 302"),
        (web.Response(status=307, headers={"Location": "/elsewhere"}), "status 307"),
        (web.Response(status=201), "status 201"),
    ],
    ids=["large", "bomb", "digits", "bytes", "redirect", "moved", "created"],
)
async def test_other_answers_fail_the_group_at_once(open_run, make_item, answer, words):
    async with served(after_open(answer)) as end, open_run(http(end.url)) as run:
        (outcome,) = await run.score([make_item("a")])
    assert (outcome.failure.reason, len(end.bodies)) == (FailureReason.ERROR, 2)
    assert words in outcome.failure.detail


@pytest.mark.parametrize("breaks", [502, 429, 408, "connection"])
async def test_failures_that_may_pass_are_tried_again(open_run, make_item, breaks):
    failed = []

    async def reply(body: dict, request: web.Request) -> web.StreamResponse:
        if body["samples"] and not failed:
            failed.append(1)
            if breaks == "connection":
                request.transport.abort()
            return web.Response(status=502 if breaks == "connection" else breaks)
        return await lengths(body, request)

    async with served(reply) as end, open_run(http(end.url)) as run:
        (outcome,) = await run.score([make_item("ab")])
    assert (outcome.reward, len(end.bodies)) == (2.0, 3)


async def test_a_late_answer_is_a_timeout_and_not_asked_for_again(open_run, make_item, hurried):
    async def reply(body: dict, request: web.Request) -> web.StreamResponse:
        if body["samples"]:
            await asyncio.Event().wait()
        return await lengths(body, request)

    async with served(reply) as end, open_run(http(end.url)) as run:
        for limit_s in LIMITS_S:
            with hurried(run._scorers[0]._remote, 0.5 * limit_s):
                outcomes = await run.score([make_item("a"), make_item("b")])
            assert [outcome.failure.reason for outcome in outcomes] == [FailureReason.TIMEOUT] * 2
            if len(end.bodies) > 1:  # where the machine is not too busy for the request to arrive
                break
    assert len(end.bodies) == 2


async def test_a_server_that_is_not_there_or_not_a_scorer_is_refused_at_open(open_run):
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="reward.scorers.0"):
        async with open_run(http("http://127.0.0.1:1", max_retries=0)):
            pass

    async def refuse(_body: dict, _request: web.Request) -> web.Response:
        return web.Response(status=401)

    async with served(refuse) as end:
        with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field="reward.scorers.0"):
            async with open_run(http(end.url)):
                pass


async def test_through_the_real_service(tmp_path):
    server, servicer = Server(), RewardServicer()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
    port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService"])
    client = Client(f"127.0.0.1:{port}", reward_pb2_grpc.RewardServiceStub)
    try:
        async with served(lengths) as end:
            config = {"scorers": [http(end.url), {"kind": "exact", "weight": 0.5}]}
            request = pb.OpenRunRequest(run_id="r", config_json=json.dumps(config))
            opened = await client.call(RewardService.OpenRun, request, timeout_s=PATIENCE_S)
            stop = types_pb2.FINISH_REASON_STOP
            candidates = [pb.Candidate(text=text, num_tokens=1, finish_reason=stop) for text in ("abc", "", "ab")]
            request = pb.ScoreRequest(run_id="r", prompt_id="1", prompt="?", answer="ab", candidates=candidates)
            answer = await client.call(RewardService.Score, request, timeout_s=PATIENCE_S)
    finally:
        await client.close()
        await servicer.close()
        await server.grpc.stop(0)
    assert opened.scorer == answer.scorer == "http lengths 1 x 1 + exact 2 x 0.5"
    assert [score.reward for score in answer.scores] == [3.0, 0.0, 2.5]
    failure = answer.scores[1].failure
    assert (failure.reason, failure.scorer, failure.message) == (pb.FAILURE_REASON_ERROR, "http", "empty")


async def test_closing_the_run_ends_a_request_of_a_group(open_run, make_item):
    arrived = asyncio.Event()

    async def reply(body: dict, request: web.Request) -> web.StreamResponse:
        if body["samples"]:
            arrived.set()
            await asyncio.Event().wait()
        return await lengths(body, request)

    async with served(reply) as end, open_run(http(end.url)) as run:
        scoring = asyncio.create_task(run.score([make_item("a")] * 2))
        await arrived.wait()
        await run.close()
        outcomes = await asyncio.wait_for(scoring, timeout=PATIENCE_S)
    assert [str(outcome.failure) for outcome in outcomes] == ["CRASHED: the run was closed"] * 2
