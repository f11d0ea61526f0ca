"""Calls the real services of the rollout tests, and plays the trainer in the test's own process."""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.trainer.v1 import trainer_pb2
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from lockstep.types.v1.types_pb2 import Completion, PolicyStamp, SamplingParams, WeightGroup, WeightPlan
from transformers import AutoModelForCausalLM

from services.common.model_card import read_model_card
from services.common.rpc.client import Client
from services.common.weights import group as weight_group
from services.common.weights.plan import Plan
from services.common.weights.store import ServedStore
from services.trainer.ranks.publish import Publication, send
from tests.support import PATIENCE_S, SMALL_CACHE

MAX_MODEL_LEN = 512
GREEDY_TOKENS = 12
# Several buckets for each layer of the tiny models, so that a publication can end in the middle of a layer.
BUCKET_BYTES = 32 << 10
PROMPTS = [[2 + (7 * i + 3 * j) % 60 for j in range(3 + i)] for i in range(8)]

_run_numbers = itertools.count()


def greedy_by_transformers(
    model: torch.nn.Module, max_tokens: int, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[list[int]]:
    """Returns the tokens with which `model` continues each prompt greedily, one at a time so that nothing is padded."""
    answers = []
    for prompt in prompts:
        tokens_BT = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0)
        answers.append(tokens_BT[0, len(prompt) :].tolist())
    return answers


def load_model(directory: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # the requests name no stop token either
    return model


@dataclass
class Replica:
    """Calls one rollout process; `log` is its log file, and `page` the address of its metrics, if it serves them."""

    client: Client
    pid: int
    log: Path
    page: str = ""
    run_id: str = ""

    async def open(
        self,
        model: Path,
        run_id: str,
        *,
        adapter_rank: int = 0,
        can_sleep: bool = False,
        return_routed_experts: bool = False,
        **config: object,
    ) -> pb.OpenRunResponse:
        request = pb.OpenRunRequest(
            run_id=run_id,
            config_json=json.dumps({"max_model_len": MAX_MODEL_LEN, "engine": SMALL_CACHE} | config),
            model_card=read_model_card(model),
            adapter_rank=adapter_rank,
            can_sleep=can_sleep,
            return_routed_experts=return_routed_experts,
        )
        self.run_id = run_id
        return await self.client.call(RolloutService.OpenRun, request, timeout_s=1200, wait_for_ready=True)

    async def close(self) -> None:
        """Closes the run that was opened last."""
        await self.client.call(RolloutService.CloseRun, pb.CloseRunRequest(run_id=self.run_id), timeout_s=PATIENCE_S)

    async def info(self) -> pb.GetInfoResponse:
        return await self.client.call(RolloutService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)

    async def join(self, group: WeightGroup, plan: WeightPlan, base_rank: int = 1) -> pb.JoinWeightGroupResponse:
        request = pb.JoinWeightGroupRequest(group=group, base_rank=base_rank, plan=plan)
        return await self.client.call(RolloutService.JoinWeightGroup, request, timeout_s=PATIENCE_S)

    async def receive(self, epoch: int, version: int) -> pb.ReceiveWeightsResponse:
        request = pb.ReceiveWeightsRequest(epoch=epoch, version=version)
        return await self.client.call(RolloutService.ReceiveWeights, request, timeout_s=PATIENCE_S)

    async def commit(self, stamp: PolicyStamp) -> None:
        await self.client.call(RolloutService.CommitWeights, pb.CommitWeightsRequest(stamp=stamp), timeout_s=PATIENCE_S)

    async def sleep(self) -> pb.SleepResponse:
        return await self.client.call(RolloutService.Sleep, pb.SleepRequest(), timeout_s=PATIENCE_S)

    async def wake(self, part: pb.EnginePart) -> pb.WakeResponse:
        return await self.client.call(RolloutService.Wake, pb.WakeRequest(part=part), timeout_s=PATIENCE_S)

    async def generate(
        self,
        stamp: PolicyStamp,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        *,
        seeds: Sequence[int] = (0,),
        **sampling: object,
    ) -> list[pb.GenerateResponse]:
        """Returns the finished groups in the order of `prompts`, with all their routed experts and sampling masks."""
        request = pb.GenerateRequest(
            expected_stamp=stamp,
            prompts=[pb.Prompt(prompt_id=str(i), tokens=p, seeds=seeds) for i, p in enumerate(prompts)],
            sampling=SamplingParams(**{"max_tokens": 24, "temperature": 0.0} | sampling),
        )
        answers, routed_experts, masks = [], defaultdict(list), defaultdict(list)
        async for answer in self.client.stream(RolloutService.Generate, request, timeout_s=1200):
            routed_experts[answer.prompt_id].extend(answer.routed_experts)
            masks[answer.prompt_id].extend(answer.sampling_mask)
            if answer.completions:
                answers.append(answer)
        for answer in answers:
            answer.routed_experts.extend(routed_experts[answer.prompt_id])
            answer.sampling_mask.extend(masks[answer.prompt_id])
        assert sorted(answer.prompt_id for answer in answers) == sorted(str(i) for i in range(len(prompts)))
        return sorted(answers, key=lambda answer: int(answer.prompt_id))

    async def greedy(self, stamp: PolicyStamp, max_tokens: int = GREEDY_TOKENS) -> list[list[int]]:
        answers = await self.generate(stamp, max_tokens=max_tokens)
        return [list(answer.completions[0].tokens) for answer in answers]

    async def until_sampling(self) -> None:
        """Waits until the engine has samples in flight."""
        async with asyncio.timeout(PATIENCE_S):
            while not (await self.info()).samples_in_flight:
                await asyncio.sleep(0.01)


def completions(answers: Sequence[pb.GenerateResponse]) -> list[Completion]:
    return [completion for answer in answers for completion in answer.completions]


@dataclass
class Stack:
    """Calls a trainer and replicas, which can be opened again and again."""

    trainer: Client
    replicas: list[Replica]
    opened: trainer_pb2.OpenRunResponse = field(default_factory=trainer_pb2.OpenRunResponse)
    run_id: str = ""
    epoch: int = 0
    members: list[Replica] = field(default_factory=list)

    async def open(self, model: Path, trainer_config: dict[str, object], **needs: Any) -> None:
        self.run_id = f"stack-{next(_run_numbers)}"
        request = trainer_pb2.OpenRunRequest(
            run_id=self.run_id, config_json=json.dumps(trainer_config), model_path=str(model), bucket_bytes=BUCKET_BYTES
        )
        self.opened, *_ = await asyncio.gather(
            self.trainer.call(TrainerService.OpenRun, request, timeout_s=1200, wait_for_ready=True),
            *(replica.open(model, self.run_id, **needs) for replica in self.replicas),
        )

    async def publish(self, version: int) -> PolicyStamp:
        """Publishes to a new group of all replicas: forms it, sends, compares the digests of both ends, and commits."""
        await self.form_group(self.replicas)
        return (await self.send(version)).stamp

    def group(self, *, world_size: int, timeout_s: float) -> WeightGroup:
        return WeightGroup(
            run_id=self.run_id,
            epoch=self.epoch,
            store_host=self.opened.store_host,
            store_port=self.opened.store_port,
            store_secret=self.opened.store_secret,
            world_size=world_size,
            backend=self.opened.weight_backend,
            timeout_s=timeout_s,
        )

    async def form_group(self, members: list[Replica]) -> None:
        self.epoch += 1
        self.members, base_rank = members, self.opened.plan.num_senders
        group = self.group(world_size=base_rank + len(members), timeout_s=60)
        request = trainer_pb2.JoinWeightGroupRequest(group=group)
        joined = await asyncio.gather(
            self.trainer.call(TrainerService.JoinWeightGroup, request, timeout_s=PATIENCE_S),
            *(replica.join(group, self.opened.plan, rank) for rank, replica in enumerate(members, base_rank)),
        )
        assert len({answer.plan_digest for answer in joined}) == 1

    async def send(self, version: int) -> trainer_pb2.SendWeightsResponse:
        """Publishes to the current group, whose epoch stays the same, and compares the digests of both ends."""
        request = trainer_pb2.SendWeightsRequest(epoch=self.epoch, version=version)
        sent, *received = await asyncio.gather(
            self.trainer.call(TrainerService.SendWeights, request, timeout_s=PATIENCE_S),
            *(replica.receive(self.epoch, version) for replica in self.members),
        )
        assert {answer.digest for answer in received} == {sent.stamp.digest}
        assert {answer.num_bytes for answer in received} == {sent.num_bytes}
        assert all(0 < end.cost.digest_s < end.duration_s for end in (sent, *received))
        await asyncio.gather(*(replica.commit(sent.stamp) for replica in self.members))
        return sent


class PlayedTrainer:
    """Plays the trainer as member 0 of the weight group, with weights of its own that differ for every version."""

    def __init__(self, directory: Path, replica: Replica, run_id: str):
        self.model, self.replica, self.run_id = load_model(directory), replica, run_id
        self.epoch = 0
        self._store = ServedStore("127.0.0.1")
        self.plan = Plan.of(self.weights(), bucket_bytes=BUCKET_BYTES)
        assert len(self.plan.buckets) > 6

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.detach()) for name, tensor in self.model.named_parameters()]

    def draw(self, seed: int) -> None:
        """Draws other weights, far enough from the last ones to change every greedy answer."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                if "norm" not in name:
                    tensor.normal_(0, 0.1, generator=generator)

    def describe_group(self, epoch: int, timeout_s: float) -> WeightGroup:
        return WeightGroup(
            run_id=self.run_id,
            epoch=epoch,
            store_host="127.0.0.1",
            store_port=self._store.address.port,
            store_secret=self._store.address.secret,
            world_size=2,
            backend="gloo",
            timeout_s=timeout_s,
        )

    async def join(self, *, timeout_s: float = 60.0) -> weight_group.WeightGroup:
        self.epoch += 1
        message = self.describe_group(self.epoch, timeout_s)
        group, answer = await asyncio.gather(
            asyncio.to_thread(weight_group.WeightGroup, message, rank=0, device=torch.device("cpu")),
            self.replica.join(message, self.plan.message),
        )
        assert answer.plan_digest == self.plan.digest
        return group

    async def send(self, group: object, version: int) -> Publication:
        return await asyncio.to_thread(send, group, self.plan, self.weights(), version=version)

    async def publish(self, version: int) -> PolicyStamp:
        """Publishes the weights without a fault, and returns their stamp."""
        group = await self.join()
        sent, received = await asyncio.gather(self.send(group, version), self.replica.receive(self.epoch, version))
        assert received.digest == sent.digest
        stamp = PolicyStamp(version=version, digest=sent.digest)
        await self.replica.commit(stamp)
        group.abort()
        return stamp

    async def assert_exact(self, stamp: PolicyStamp) -> None:
        """Asserts that the replica answers as transformers does with the weights that were sent."""
        assert await self.replica.greedy(stamp) == greedy_by_transformers(self.model, GREEDY_TOKENS)
