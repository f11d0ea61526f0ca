"""Tests what is kept of a call: ids and hashes of request and answer, and how it ended, also if it is a stream."""

import json
from pathlib import Path

import pytest
from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.trainer.v1 import trainer_pb2
from lockstep.types.v1.types_pb2 import PolicyStamp, SamplingParams, WeightGroup

from services.common.errors import PreconditionFailed, Reason
from services.common.rpc.client import Client
from services.common.rpc.history import ids_of, keeping, line_files, note_row
from services.coordinator.clients.trainer import whole_batch
from tests.coordinator.fake_services import replicas
from tests.support import PATIENCE_S, make_batch

STAMP = PolicyStamp(version=0, digest="d" * 32)


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for path in line_files(directory) for line in path.read_text().splitlines()]


async def test_calls_streams_failures_and_rows_have_their_lines_in_order(tmp_path: Path) -> None:
    prompt = rollout_pb2.Prompt(prompt_id="p", tokens=[1], seeds=[1])
    request = rollout_pb2.GenerateRequest(expected_stamp=STAMP, prompts=[prompt], sampling=SamplingParams())
    async with replicas(1) as (replica,):
        client = Client(replica.address, rollout_pb2_grpc.RolloutServiceStub)
        replica.error = {"JoinWeightGroup": PreconditionFailed("no", reason=Reason.OLD_EPOCH)}
        with keeping(tmp_path, "run", 4):
            receive = rollout_pb2.ReceiveWeightsRequest(epoch=3, version=0)
            await client.call(RolloutService.ReceiveWeights, receive, timeout_s=PATIENCE_S, wait_for_ready=True)
            note_row(5, "published", 0)
            async for _ in client.stream(RolloutService.Generate, request, timeout_s=PATIENCE_S):
                pass
            join = rollout_pb2.JoinWeightGroupRequest(group=WeightGroup(epoch=9, store_secret=b"secret"))
            with pytest.raises(PreconditionFailed):
                await client.call(RolloutService.JoinWeightGroup, join, timeout_s=PATIENCE_S)
        await client.call(RolloutService.ReceiveWeights, receive, timeout_s=PATIENCE_S)
        await client.close()
    first, *rest = lines(tmp_path)
    assert (first["session"], first["rows"], first["continues"]) == ("run", 4, False)
    times = [line.pop("t") for line in rest]
    assert times == sorted(times)
    (answer,) = rest[4].pop("got")
    assert answer.pop("sha256")
    stamp = [0, "d" * 32]
    assert answer == {"prompt_id": "p", "stamp": stamp}
    peer = replica.address
    assert rest == [
        {"n": 1, "call": "rollout.ReceiveWeights", "peer": peer, "sent": {"epoch": 3, "version": 0}},
        {"n": 1, "end": "OK", "got": [{"digest": "digest"}]},
        {"row": 5, "kind": "published", "version": 0},
        {"n": 2, "call": "rollout.Generate", "peer": peer, "sent": {"expected_stamp": stamp, "prompts": ["p"]}},
        {"n": 2, "end": "OK"},
        {"n": 3, "call": "rollout.JoinWeightGroup", "peer": peer, "sent": {"group": {"epoch": 9, "world_size": 0}}},
        {"n": 3, "end": "OLD_EPOCH", "got": []},
    ]


async def test_of_a_batch_its_header_and_its_hashes_are_kept() -> None:
    header = trainer_pb2.TrainHeader(expected_stamp=STAMP, batch_id="run/0", temperature=1.0)
    sent = [ids_of(message) async for message in whole_batch(header, make_batch(1, 1, STAMP))]
    assert [sorted(ids) for ids in sent] == [["header"], [], ["block"], ["commit"]]
    assert [{*part} for ids in sent[2:] for part in ids.values()] == [{"sha256"}] * 2
    assert (sent[0]["header"]["batch_id"], sent[0]["header"]["expected_stamp"]) == ("run/0", [0, "d" * 32])


def test_equal_answers_have_equal_hashes_and_others_do_not() -> None:
    first, same, other = (trainer_pb2.TrainResponse(version=1, metrics={"a": 1.0, "b": b}) for b in (2.0, 2.0, 3.0))
    assert ids_of(first) == ids_of(same) != ids_of(other)
