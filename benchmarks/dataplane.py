"""Measures sending a step's batch from coordinator to trainer: real client, Train RPC and framing, without the update.

The batch has 2,560 samples and 3.4 M tokens, like a step of SkyRL's published table. For comparison, the same number of
bytes is sent through a plain loopback socket in the same run.
"""

import asyncio
import multiprocessing
import socket
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import numpy as np
import pyarrow as pa
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.types.v1.types_pb2 import PolicyStamp

from benchmarks.report import keep
from services.common.batches import SAMPLE_SCHEMA
from services.common.config.run import Config
from services.common.rpc.server import Server
from services.coordinator.clients.trainer import Trainer
from services.trainer.stream import BatchReader

_SAMPLES, _PROMPT_TOKENS, _MEAN_TOKENS = 2560, 175, 1158
_REPEATS = 12


class OnlyReceives(trainer_pb2_grpc.TrainerServiceServicer):
    """Receives a batch as the trainer does, and answers with its size."""

    async def Train(self, request_iterator: AsyncIterator[pb.TrainRequest], context: object) -> pb.TrainResponse:
        reader = BatchReader(request_iterator)
        await reader.header()
        samples = await reader.rest()
        return pb.TrainResponse(version=samples.num_rows)


def make_batch(seed: int = 0) -> pa.Table:
    """Returns samples with log-normal lengths, as RL post-training produces them."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(_MEAN_TOKENS) - 0.125, 0.5, _SAMPLES).astype(int), 16, 4096)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    prompts = pa.array(np.arange(_SAMPLES + 1, dtype=np.int32) * _PROMPT_TOKENS)

    def values(dtype: type, count: int) -> pa.Array:
        return pa.array(random.integers(0, 150_000, count).astype(dtype))

    columns = {
        "prompt_id": pa.array([str(i // 5) for i in range(_SAMPLES)]),
        "group": pa.array(np.arange(_SAMPLES, dtype=np.int32) // 5),
        "sample": pa.array(np.arange(_SAMPLES, dtype=np.int32) % 5),
        "prompt_tokens": pa.ListArray.from_arrays(prompts, values(np.uint32, _SAMPLES * _PROMPT_TOKENS)),
        "tokens": pa.ListArray.from_arrays(offsets, values(np.uint32, int(lengths.sum()))),
        "logprobs": pa.ListArray.from_arrays(offsets, values(np.float32, int(lengths.sum()))),
        "ref_logprobs": pa.ListArray.from_arrays(offsets, values(np.float32, int(lengths.sum()))),
        "reward": pa.array(random.random(_SAMPLES)),
        "components": pa.array([[("math", 1.0)]] * _SAMPLES, pa.map_(pa.string(), pa.float64())),
        "advantages": pa.ListArray.from_arrays(offsets, values(np.float32, int(lengths.sum()))),
        "finish_reason": pa.array(["stop"] * _SAMPLES),
        "policy_version": pa.array(np.zeros(_SAMPLES, np.uint64)),
        "policy_digest": pa.array(["0" * 32] * _SAMPLES),
        "scorer": pa.array(["math 1"] * _SAMPLES),
        "seed": pa.array(np.arange(_SAMPLES, dtype=np.uint64)),
    }
    missing = {field.name: pa.nulls(_SAMPLES, field.type) for field in SAMPLE_SCHEMA}
    return pa.table([(missing | columns)[name] for name in SAMPLE_SCHEMA.names], schema=SAMPLE_SCHEMA)


def _serve(port_to: Connection) -> None:
    async def run() -> None:
        server = Server()
        servicer = OnlyReceives()  # pyright: ignore[reportAbstractUsage] the generated class is not abstract
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
        port_to.send(await server.start("127.0.0.1:0", ["lockstep.trainer.v1.TrainerService"]))
        await server.serve()

    asyncio.run(run())


async def _send(port: int, batch: pa.Table) -> list[float]:
    data, reward = {"train": "unused", "prompts_per_step": 1}, {"scorers": [{"kind": "exact"}]}
    config = Config.model_validate({"model": "unused", "data": data, "reward": reward})
    trainer, seconds = Trainer(f"127.0.0.1:{port}", config), []
    for index in range(_REPEATS):
        begin = time.perf_counter()
        num_rows, _ = await trainer.train(batch, str(index), PolicyStamp())
        seconds.append(time.perf_counter() - begin)
        assert num_rows == batch.num_rows
    await trainer.close()
    return seconds[2:]  # the first two warm up channel and allocator


def _bare_socket(num_bytes: int) -> list[float]:
    payload, seconds = bytes(num_bytes), []
    for _ in range(_REPEATS):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
            receiver, _ = server.accept()
            begin = time.perf_counter()
            thread = threading.Thread(target=sender.sendall, args=(payload,))
            thread.start()
            left, buffer = num_bytes, bytearray(1 << 20)
            while left:
                left -= receiver.recv_into(buffer)
            thread.join()
            seconds.append(time.perf_counter() - begin)
            receiver.close()
    return seconds[2:]


def main() -> None:
    """Measures and saves the result."""
    batch = make_batch()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    seconds = asyncio.run(_send(ours.recv(), batch))
    process.terminate()
    process.join()
    bare = _bare_socket(batch.nbytes)
    num_tokens = len(batch["tokens"].combine_chunks().values) + _SAMPLES * _PROMPT_TOKENS
    keep(
        "dataplane",
        {
            "batch to trainer [s]": seconds,
            "batch to trainer [GB/s]": [batch.nbytes / s / 1e9 for s in seconds],
            "bare socket [GB/s]": [batch.nbytes / s / 1e9 for s in bare],
        },
        libraries=("grpcio", "pyarrow", "protobuf"),
        num_samples=_SAMPLES,
        num_tokens=num_tokens,
        num_bytes=batch.nbytes,
    )


if __name__ == "__main__":
    main()
