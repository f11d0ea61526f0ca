"""Measures how the coordinator's part of a step grows with replicas, samples and tokens, on real gRPC.

Replicas, a reward service and a trainer that only receives run in another process, which makes up their answers. The
coordinator does all that it does in a step: it collects the groups (decoding and scoring among it), makes the table
with advantages, writes Parquet, hashes the file and records the batch in the ledger, computes the metrics, and sends
the batch to the trainer. Each case runs in a process of its own, so that its peak of memory is its own. CPU seconds are
those of the coordinator's process, all threads; seconds of collecting are also those of the other process, which makes
all samples alone.

`python -m benchmarks.scale [REPLICAS,SAMPLES,TOKENS ...]`
"""

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import random
import resource
import string
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tokenizers
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.rollout.v1 import rollout_pb2
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP, Completion, ModelCard, PolicyStamp

from benchmarks.dataplane import OnlyReceives
from benchmarks.report import keep
from services.common.batches import content_sha256, tokens_sha256
from services.common.rpc.server import Server
from services.common.rpc.transfer import seal
from services.common.tasks import gather
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.clients.trainer import Trainer
from services.coordinator.rl.metrics import batch_metrics
from services.coordinator.rl.sampling.collect import Collector, PromptRequest
from services.coordinator.rl.step import samples_of
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.record import CollectedBatch, RunRecord, batch_path, sha256_of
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.fake_services import FakeReplica, FakeReward, make_config, make_prompt

_VOCAB_SIZE, _PROMPT_TOKENS, _GROUP, _DISTINCT_TOKENS = 150_000, 200, 8, 1 << 20
_STAMP = PolicyStamp(version=0, digest="0" * 32)
# Replicas, samples and tokens of a sample.
_CASES = [
    (4, 512, 1000),
    (4, 4096, 1000),
    (64, 4096, 1000),
    (256, 4096, 1000),
    (256, 32768, 125),
    (64, 16384, 1000),
    (256, 32768, 4000),
]
Case = tuple[int, int, int]


class _Replica(FakeReplica):
    """Answers at once, with one of many samples after the other."""

    def __init__(self, samples: Iterator[Completion]):
        super().__init__(max_samples=32)
        self._samples = samples

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        (prompt,) = request.prompts
        answer = rollout_pb2.GenerateResponse(
            prompt_id=prompt.prompt_id,
            stamp=request.expected_stamp,
            prompt_num_tokens=len(prompt.tokens),
            prompt_sha256=tokens_sha256(prompt.tokens),
        )
        for seed in prompt.seeds:
            completion = answer.completions.add()
            completion.CopyFrom(next(self._samples))
            completion.seed = seed
        yield seal(request, answer)


def _serve(num_replicas: int, num_tokens: int, addresses_to: Connection) -> None:
    numbers = random.Random(0)

    def sample() -> Completion:
        tokens = numbers.choices(range(_VOCAB_SIZE), k=num_tokens)
        logprobs = [-numbers.expovariate(2.0) for _ in range(num_tokens)]
        return Completion(tokens=tokens, logprobs=logprobs, finish_reason=FINISH_REASON_STOP)

    # So many that compression does not find the one before.
    samples = itertools.cycle([sample() for _ in range(-(-_DISTINCT_TOKENS // num_tokens))])

    async def run() -> None:
        fakes = [_Replica(samples) for _ in range(num_replicas)]  # pyright: ignore[reportAbstractUsage]
        for fake in fakes:
            await fake.start()
        server = Server()
        scorer = FakeReward(set())  # pyright: ignore[reportAbstractUsage] the generated class is not abstract
        reward_pb2_grpc.add_RewardServiceServicer_to_server(scorer, server.grpc)
        servicer = OnlyReceives()  # pyright: ignore[reportAbstractUsage] the generated class is not abstract
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
        services = ["lockstep.reward.v1.RewardService", "lockstep.trainer.v1.TrainerService"]
        port = await server.start("127.0.0.1:0", services)
        addresses_to.send([f"127.0.0.1:{port}", *(fake.address for fake in fakes)])
        await server.serve()

    asyncio.run(run())


def _tokenizer() -> Tokenizer:
    """Returns a byte-level tokenizer with as many tokens as usual ones, of two to eight letters."""
    numbers, alphabet = random.Random(0), sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: place for place, letter in enumerate(alphabet)}
    while len(vocab) < _VOCAB_SIZE:
        vocab.setdefault("".join(numbers.choices(string.ascii_lowercase, k=numbers.randrange(2, 9))), len(vocab))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, None, (1,))


class _Times(defaultdict[str, list[float]]):
    """Raw samples by quantity."""

    def __init__(self) -> None:
        super().__init__(list)

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self[f"{part} [s]"].append(time.perf_counter() - wall)
        self[f"{part} [CPU s]"].append(time.process_time() - cpu)


async def _step(case: Case, addresses: list[str], directory: Path) -> _Times:
    """Returns the times of all parts of two steps, or of one if it has very many tokens."""
    num_replicas, num_prompts, num_tokens = case[0], case[1] // _GROUP, case[2]
    config = make_config(
        data={"train": "unused", "prompts_per_step": num_prompts},
        timeouts={},
        rollout={
            "num_replicas": num_replicas,
            "completions_per_prompt": _GROUP,
            "sampling": {"max_tokens": num_tokens},
            "max_model_len": num_tokens + 1024,
        },
    )
    tokenizer, times = _tokenizer(), _Times()
    rollout, rewards = Rollout(addresses[1:], config), Rewards(addresses[:1], config)
    trainer = Trainer(addresses[0], config)
    with times.of("open replicas"):
        await rollout.open("run", ModelCard())
    for replica in rollout.replicas:
        await replica.commit(_STAMP)
    collector = Collector(rollout, rewards, tokenizer, 0)
    prompts = [make_prompt(index, _PROMPT_TOKENS) for index in range(num_prompts)]
    request = PromptRequest(_GROUP, config.rollout.sampling, _STAMP, 0)
    record = RunRecord(directory, Ledger(directory / "ledger.sqlite"))
    gc.freeze()  # as a run does before its first step
    for version in range(2 if case[1] * num_tokens < 50_000_000 else 1):
        with times.of("collect"):
            collected = await gather(collector.one(index, prompt, request) for index, prompt in enumerate(prompts))
        groups = [group for group in collected if group]
        with times.of("collect: decode"):
            for group in groups:
                tokenizer.decode_batch([completion.tokens for completion in group.completions])
        with times.of("table and advantages"):
            samples = samples_of(config, groups, 0.0)
        outcomes = {prompt.prompt_id: (_GROUP, 1) for prompt in prompts}
        batch = CollectedBatch(samples, version, _STAMP, {}, outcomes, "digest", len(prompts), None)
        with times.of("record"):
            record.record_batch(batch)
        with times.of("record: file's hash"):
            sha256_of(batch_path(directory, version))
        with times.of("record: ledger"), record.ledger.transaction():
            record.ledger.record(Kind.SELECTED, version)
            record.ledger.keep_outcomes(version, outcomes)
        times["Parquet [GB]"].append(batch_path(directory, version).stat().st_size / 1e9)
        batch_path(directory, version).unlink()
        with times.of("metrics"):
            batch_metrics(samples)
        with times.of("send"):
            await trainer.train(samples, str(version), _STAMP)
        with times.of("send: content's hash"):
            content_sha256(samples)
    for client in (trainer, rewards, rollout):
        await client.close()
    return times


def _measure(case: Case, addresses: list[str], times_to: Connection) -> None:
    own_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    with tempfile.TemporaryDirectory() as directory:
        times = asyncio.run(_step(case, addresses, Path(directory)))
    times["memory before [GB]"] = [own_gb]
    times["peak memory [GB]"] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6]
    times_to.send(dict(times))


def _run(case: Case) -> dict[str, list[float]]:
    context = multiprocessing.get_context("spawn")
    addresses_from, addresses_to = context.Pipe(duplex=False)
    times_from, times_to = context.Pipe(duplex=False)
    services = context.Process(target=_serve, args=(case[0], case[2], addresses_to), daemon=True)
    services.start()
    addresses_to.close()  # so that `recv` fails if the process ends
    coordinator = context.Process(target=_measure, args=(case, addresses_from.recv(), times_to), daemon=True)
    coordinator.start()
    times_to.close()
    try:
        return times_from.recv()
    finally:
        for process in (coordinator, services):
            process.kill()
            process.join()


def main() -> None:
    """Measures the cases, and saves the result after each."""
    cases = [tuple(map(int, argument.split(","))) for argument in sys.argv[1:]] or _CASES
    samples: dict[str, list[float]] = {}
    libraries = ("grpcio", "protobuf", "pyarrow", "numpy", "tokenizers")
    for replicas, num_samples, num_tokens in cases:
        name = f"{replicas} replicas, {num_samples} samples, {num_samples * num_tokens / 1e6:g} M tokens"
        times = _run((replicas, num_samples, num_tokens))
        samples |= {f"{name}: {quantity}": values for quantity, values in times.items()}
        keep("scale", samples, libraries=libraries, group=_GROUP, prompt_tokens=_PROMPT_TOKENS)


if __name__ == "__main__":
    main()
