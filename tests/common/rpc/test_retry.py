"""Tests that calls are repeated after a lost connection, and only then."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import LockstepError, PreconditionFailed, Reason, Unavailable
from services.common.rpc import client as retry
from services.common.rpc.client import repeated
from services.common.rpc.server import Server
from services.coordinator.clients.trainer import Trainer
from tests.coordinator.fake_services import make_config
from tests.support import PATIENCE_S, make_batch, raises


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    pauses: list[int] = []
    monkeypatch.setattr(retry, "backoff_s", lambda num_retries: pauses.append(num_retries) or 0.0)
    return pauses


class Failing:
    """Raises the errors, one for each call, and then answers."""

    def __init__(self, *errors: LockstepError):
        self.errors = list(errors)
        self.timeouts: list[float] = []

    async def __call__(self, timeout_s: float) -> str:
        self.timeouts.append(timeout_s)
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


async def test_after_lost_connections_the_call_is_made_again_within_its_deadline(no_pauses: list[int]):
    call = Failing(Unavailable("reset"), Unavailable("refused"))
    assert await repeated(call, timeout_s=100.0) == "answer"
    assert no_pauses == [0, 1]
    assert 100 >= call.timeouts[0] > call.timeouts[1] > call.timeouts[2] > 0


@pytest.mark.parametrize(
    "error",
    [Unavailable("dead", reason=Reason.ENGINE_DEAD), PreconditionFailed("replaced", reason=Reason.RUN_REPLACED)],
)
async def test_what_the_service_itself_answers_is_final(error: LockstepError):
    call = Failing(error)
    with pytest.raises(type(error)) as caught:
        await repeated(call, timeout_s=100.0)
    assert caught.value is error
    assert len(call.timeouts) == 1


@pytest.mark.parametrize(("timeout_s", "max_retry_s"), [(100.0, 0.0), (0.0, 100.0)])
async def test_a_service_that_is_gone_is_an_error_in_the_end(timeout_s: float, max_retry_s: float):
    call = Failing(Unavailable("gone"))
    with raises(Unavailable):
        await repeated(call, timeout_s=timeout_s, max_retry_s=max_retry_s)


class _Proxy:
    """Forwards TCP to a port; `reset` ends the connections of the moment with RST."""

    def __init__(self, port: int):
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def close(self) -> None:
        self._server.close()
        self.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, to_writer]
        await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer), return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


class _SlowTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Lets the test do something in the first Train, and in each publication."""

    def __init__(self) -> None:
        self.batch_ids: list[str] = []
        self.num_sent = 0
        self.entered = asyncio.Event()

    async def Train(self, requests: AsyncIterator[pb.TrainRequest], context: object) -> pb.TrainResponse:
        self.batch_ids += [request.header.batch_id async for request in requests if request.HasField("header")]
        if len(self.batch_ids) == 1:
            self.entered.set()
            await asyncio.Event().wait()
        return pb.TrainResponse(version=1, metrics={"loss": 0.5}, replayed=True)

    async def SendWeights(self, request: pb.SendWeightsRequest, context: object) -> None:
        self.num_sent += 1
        self.entered.set()
        await asyncio.Event().wait()


@pytest_asyncio.fixture
async def slow() -> AsyncIterator[tuple[_SlowTrainer, _Proxy, Trainer]]:
    server, trainer = Server(), _SlowTrainer()
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server.grpc)
    proxy = _Proxy(await server.start("127.0.0.1:0", ["lockstep.trainer.v1.TrainerService"]))
    client = Trainer(f"127.0.0.1:{await proxy.start()}", make_config())
    yield trainer, proxy, client
    await client.close()
    proxy.close()
    await server.grpc.stop(0)


async def test_a_connection_that_is_reset_in_train_does_not_end_the_run(slow: tuple[_SlowTrainer, _Proxy, Trainer]):
    trainer, proxy, client = slow
    stamp = PolicyStamp(version=0, digest="d")
    training = asyncio.create_task(client.train(make_batch(2, 2, stamp), "run/0", stamp))
    async with asyncio.timeout(PATIENCE_S):
        await trainer.entered.wait()
        proxy.reset()
        assert await training == (1, {"loss": 0.5})
    assert trainer.batch_ids == ["run/0", "run/0"]


async def test_a_call_that_must_not_be_repeated_is_made_once(slow: tuple[_SlowTrainer, _Proxy, Trainer]):
    trainer, proxy, client = slow
    sending = asyncio.create_task(client.send(1, 0))
    async with asyncio.timeout(PATIENCE_S):
        await trainer.entered.wait()
        proxy.reset()
        with pytest.raises(Unavailable):
            await sending
    assert trainer.num_sent == 1
