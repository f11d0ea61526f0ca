"""One vLLM engine (AsyncLLM): tokens in, tokens out, sleep, and why it did not start or died.

vLLM's engine is a process of its own, and its error is only in the log.
"""

import asyncio
import contextlib
import multiprocessing
import os
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, TypeVarTuple

import torch
from lockstep.types.v1.types_pb2 import DeviceMemory, ModelCard, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.common.config.rollout import RolloutConfig
from services.common.errors import InternalError, InvalidInput, Overloaded, PreconditionFailed, Reason, Unavailable
from services.common.families.supported import check_bounds
from services.common.memory import DeviceState, changed, gib
from services.common.model_card import write_model_card
from services.common.process import own_log, socket_directory
from services.common.routed_experts import RoutedExpertsShape
from services.common.rpc.progress import PROGRESS
from services.common.telemetry import Span
from services.rollout.arguments import (
    Needs,
    check_adapters_run,
    check_draft,
    check_precision,
    engine_arguments,
    leave_out_states,
)
from services.rollout.compat import client
from services.rollout.compat.patches import STAGES_SOCKET
from services.rollout.compat.recorded import refusal, returning_experts, returning_masks
from services.rollout.compat.scheduler import fewest_of
from services.rollout.compat.worker import KV_CACHE, WEIGHTS
from services.rollout.receiver import Fit, WeightReceiver, adapter_request
from services.rollout.sampling import Sample, engine_prompt, engine_sampling, sample_of

Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")

_MAX_READ_BYTES = 4 << 20
_ERROR = re.compile(r"\b(\w*(?:Error|Exception): .+)")
# What vLLM's other processes say after the engine's own error.
_CONSEQUENCE = re.compile("(Engine core|WorkerProc) initialization failed|EngineDeadError|Worker failed with error")
_MEMORY = re.compile(r"out of memory|Free memory on device|No available memory for the cache|gpu_memory_utilization")
_MAX_SHOWN = 500
_MAX_STAGE_BYTES = 100

# How long vLLM may take to abort samples. It takes milliseconds.
_ABORT_S = 60.0


@contextlib.contextmanager
def _following_stages(path: Path) -> Generator[None]:
    """Shows as stages of this service what the engine's process says that it does, in the block that starts it."""
    loop, running = asyncio.get_running_loop(), [Span("load the model")]

    def take() -> None:
        PROGRESS.end(running.pop())
        running.append(Span(listener.recv(_MAX_STAGE_BYTES).decode()))
        PROGRESS.begin(running[0])

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        loop.add_reader(listener, take)
        PROGRESS.begin(running[0])
        try:
            yield
        finally:
            loop.remove_reader(listener)
            PROGRESS.end(running[0])


class Engine:
    """One engine. `on_death` is called once if the engine dies by itself."""

    def __init__(
        self,
        llm: AsyncLLM,
        directory: TemporaryDirectory[str],
        on_death: Callable[[], None],
        adapter: LoRARequest | None = None,
    ):
        self._adapter = adapter
        self._llm, self._directory = llm, directory
        self._loop = asyncio.get_running_loop()
        self._died: asyncio.Future[None] = self._loop.create_future()
        self._on_death = on_death
        self._begin, self._cause = log_size(), None
        self._cache_salt = ""
        self._has_tokenizer = False
        self._loading_tokenizer = asyncio.Lock()
        # vLLM's processes are the only ones that multiprocessing has started here; a sentinel is readable when its
        # process has ended.
        self._sentinels = [process.sentinel for process in multiprocessing.active_children()]
        for sentinel in self._sentinels:
            self._loop.add_reader(sentinel, self._note_death)
        self.samples_in_flight = self._fewest_tokens = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.routed_experts: RoutedExpertsShape | None = None
        """The shape of the routed experts that it returns; None if it returns none."""
        self.asleep: frozenset[str] = frozenset()
        """The parts of the engine, WEIGHTS and KV_CACHE, whose memory is freed."""

    @classmethod
    async def start(
        cls, config: RolloutConfig, card: ModelCard, seed: int, on_death: Callable[[], None], needs: Needs
    ) -> "Engine":
        """Starts vLLM with dummy weights.

        Raises:
            NotFound: The model card has no config.json.
            InvalidInput: The model card or an engine argument is invalid, or this host lacks the head that drafts or a
                place for sockets.
            PreconditionFailed: UNSUPPORTED_VERSION, this host lacks the package for suffix decoding, or a GPU that
                computes in float8.
            InternalError: ENGINE_DEAD, with the cause if this process's log has it.
        """
        check_draft(config)
        check_precision(config)
        begin = log_size()
        try:
            client.restore_directories()
        except InternalError:
            on_death()
            raise
        directory = socket_directory()
        write_model_card(card, Path(directory.name))
        check_bounds(directory.name)
        os.environ["VLLM_RPC_BASE_PATH"] = directory.name  # vLLM never removes the sockets that it makes there
        try:
            made = engine_arguments(config, directory.name, seed, needs)
            if config.sampling.is_truncated:
                made = returning_masks(made, is_gpu=torch.cuda.is_available())
            returning = returning_experts(made, is_gpu=torch.cuda.is_available()) if needs.routed_experts else None
            arguments = AsyncEngineArgs(**(returning or made))
            is_split = arguments.data_parallel_size > 1 and torch.cuda.is_available()
            leave_out_states(arguments)
            if needs.adapter_rank:
                check_adapters_run(arguments)
            suitable = client.suitable_model_runner(made, is_gpu=torch.cuda.is_available())
            spawning = client.spawning_engines() if is_split else contextlib.nullcontext()
            with spawning, suitable, _following_stages(Path(directory.name, STAGES_SOCKET)):
                llm = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
        except InvalidInput:
            raise
        except (TypeError, ValueError) as error:  # vLLM raises these for unknown or invalid arguments
            message = " ".join(str(error).split())
            raise InvalidInput(f"rollout: vLLM refuses its arguments: {message}", field="rollout.engine") from error
        except RuntimeError as error:
            raise start_failure(error, begin) from error
        engine = cls(llm, directory, on_death, adapter_request(directory.name) if needs.adapter_rank else None)
        if returning:
            engine.routed_experts = needs.routed_experts
            await engine.call_workers(WeightReceiver.lockstep_record_experts)
        if config.sampling.is_truncated and not all(await engine.call_workers(WeightReceiver.lockstep_record_masks)):
            await engine.close()
            raise refusal("the model runner of this vLLM does not tell which tokens it has kept")
        return engine

    @property
    def num_workers(self) -> int:
        """Number of engine workers, each of which is a member of the weight group."""
        parallel = self._llm.vllm_config.parallel_config
        return parallel.world_size * parallel.data_parallel_size

    def unfinished(self) -> dict[str, int]:
        """Returns, by prompt id, a lower bound of the longest sample's tokens of prompts with unfinished samples."""
        lengths: dict[str, int] = {}
        for request_id, num_tokens in client.lengths_so_far(self._llm):
            prompt_id, least = request_id.rpartition("/")[0], self._fewest_tokens if num_tokens else 0
            lengths[prompt_id] = max(num_tokens + 1, least + 1, lengths.get(prompt_id, 0))  # none ends without another
        return lengths

    async def sample(
        self, prompt_tokens: Sequence[int], seed: int, sampling: SamplingParams, prompt_id: str = ""
    ) -> Sample:
        """Samples one completion of one prompt.

        Raises:
            InvalidInput: The prompt exceeds the engine's context or vocabulary, vLLM rejects the sampling, or there are
                stop strings and the model has no tokenizer.
            PreconditionFailed: The sample was aborted because the weights changed.
            InternalError: A log-probability is not finite, or masks or experts are missing.
            Unavailable: The engine died.
        """
        prompt = engine_prompt(prompt_tokens, sampling, self._llm.model_config)
        prompt["cache_salt"] = self._cache_salt
        if sampling.stop:
            await self._load_tokenizer()
        output: RequestOutput | None = None
        self.samples_in_flight += 1
        self._fewest_tokens = 0
        self._idle.clear()
        try:
            # Begins with the prompt's id, by which `unfinished` knows the samples of a prompt.
            request_id = f"{prompt_id}/{uuid.uuid4().hex}"
            outputs = self._llm.generate(
                prompt, engine_sampling(sampling, seed), request_id, lora_request=self._adapter
            )
            async for last in outputs:
                output = last
        except EngineDeadError as error:
            raise self._death() from error
        except (ValueError, VLLMValidationError) as error:
            raise InvalidInput(f"sampling: {error}", field="sampling") from error
        finally:
            self.samples_in_flight -= 1
            if not self.samples_in_flight:
                self._idle.set()
        assert output is not None, "vLLM ends every request with an output"
        # Other schedulers have other samples, and one with stop strings ends with fewer tokens than its scheduler has.
        is_known = self._llm.vllm_config.parallel_config.data_parallel_size == 1 and not sampling.stop
        self._fewest_tokens = fewest_of(output) if is_known else 0
        return sample_of(output, seed, sampling, self.routed_experts)

    async def call_workers(
        self, method: Callable[[WeightReceiver, *Arguments], Answer], *args: *Arguments
    ) -> list[Answer]:
        """Calls a method of every worker, such as `WeightReceiver.lockstep_join`; returns their answers.

        It also detects the engine's death, after which vLLM's answer would never come.

        Raises:
            Unavailable: The engine died.
        """
        name = method.__name__
        return await self._until_death(self._llm.collective_rpc(name, args=args), name)

    async def sleep(self) -> list[DeviceMemory]:
        """Frees weights and KV cache, and returns the memory of each worker. The caller has no samples here.

        vLLM before 0.32 cannot sleep while only a part is awake, so the KV cache is woken first then.

        Raises:
            Overloaded: OUT_OF_MEMORY, there is no memory for the KV cache, which has to be woken first.
            Unavailable: The engine died.
        """
        begin = time.perf_counter()
        if self.asleep == {KV_CACHE}:
            await self.wake(KV_CACHE)
        before = await self._memory()
        if not self.asleep:
            await self._until_idle()
            await self.call_workers(WeightReceiver.lockstep_before_sleep)
            # Level 2 drops the weights; level 1 would copy them to host memory, and they are sent anew anyway.
            await self._until_death(self._llm.sleep(level=2), "sleep")
            self.asleep = frozenset((WEIGHTS, KV_CACHE))
        return await self._changed_memory(before, begin)

    async def wake(self, part: str) -> list[DeviceMemory]:
        """Takes memory for WEIGHTS or KV_CACHE, with unspecified content, and returns the memory of each worker.

        Raises:
            Overloaded: OUT_OF_MEMORY, the device of a worker has too little. Nothing was taken on any.
            Unavailable: The engine died.
        """
        begin = time.perf_counter()
        before = await self._memory()
        if part in self.asleep:
            _require_fit(part, await self.call_workers(WeightReceiver.lockstep_fit, part, list(self.asleep)))
            await self._until_death(self._llm.wake_up(tags=[part]), f"wake_up of {part}")
            self.asleep -= {part}
        return await self._changed_memory(before, begin)

    async def pause(self) -> None:
        await client.abort_samples(self._llm)

    async def resume(self) -> None:
        """Resumes sampling. Later requests use no entry that is in the prefix cache now.

        A new salt makes the old entries unreachable. Emptying the cache would visit every block, which takes 0.1 s if a
        small model leaves memory for very many of them. A request from before the weights changed may still use the old
        entries, but its sample is refused because of its stamp.
        """
        self._cache_salt = uuid.uuid4().hex
        await self._llm.resume_generation()

    async def close(self) -> None:
        self._forget_processes()
        await client.stop_reading(self._llm)
        # There is nothing to wait for: the samples in progress have failed.
        await asyncio.to_thread(self._llm.shutdown, timeout=0)
        self._directory.cleanup()

    async def _load_tokenizer(self) -> None:
        async with self._loading_tokenizer:
            if self._has_tokenizer:
                return
            try:
                await asyncio.to_thread(client.set_tokenizer, self._llm, Path(self._directory.name))
            except (OSError, ValueError) as error:
                message = f"sampling: stop strings need the model's tokenizer: {' '.join(str(error).split())}"
                raise InvalidInput(message, field="sampling.stop") from error
            self._has_tokenizer = True

    async def _until_death(self, request: Awaitable[Answer], name: str) -> Answer:
        call = asyncio.ensure_future(request)
        await asyncio.wait({call, self._died}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done() or isinstance(call.exception(), EngineDeadError):
            call.cancel()
            raise self._death(f" during {name}")
        return call.result()

    def _death(self, when: str = "") -> Unavailable:
        if self._cause is None:  # once: each of many samples asks
            self._cause = cause_of_death(self._begin)
        return Unavailable(f"the engine died{when}{self._cause}", reason=Reason.ENGINE_DEAD)

    async def _until_idle(self) -> None:
        """Waits until samples whose caller is gone have ended."""
        try:
            async with asyncio.timeout(_ABORT_S):
                await self._idle.wait()
        except TimeoutError as error:
            message = f"{self.samples_in_flight} canceled samples have not ended within {_ABORT_S:g} s"
            raise PreconditionFailed(message) from error

    async def _memory(self) -> list[DeviceState]:
        return await self.call_workers(WeightReceiver.lockstep_memory, list(self.asleep))

    async def _changed_memory(self, before: Sequence[DeviceState], begin: float) -> list[DeviceMemory]:
        after = await self._memory()
        duration_s = time.perf_counter() - begin
        return [changed(*states, duration_s) for states in zip(before, after, strict=True)]

    def _note_death(self) -> None:
        self._forget_processes()
        if not self._died.done():
            self._died.set_result(None)
            self._on_death()

    def _forget_processes(self) -> None:
        for sentinel in self._sentinels:
            with contextlib.suppress(ValueError):
                self._loop.remove_reader(sentinel)
        self._sentinels = []


def _require_fit(part: str, fits: Sequence[Fit]) -> None:
    for index, fit in enumerate(fits):
        if fit["needed_bytes"] > fit["free_bytes"]:
            raise Overloaded(
                f"worker {index} needs {gib(fit['needed_bytes'])} for its {part}, but {fit['device_uuid']} has only "
                f"{gib(fit['free_bytes'])} free",
                reason=Reason.OUT_OF_MEMORY,
                **fit,
            )


def log_size() -> int:
    """Returns the size of this process's log, or 0 if it has none."""
    return os.path.getsize(path) if (path := own_log()) else 0


def start_failure(error: BaseException, begin: int) -> InternalError:
    """Returns the error to raise if vLLM did not start; `begin` is what `log_size` returned before."""
    cause = cause_of_death(begin, otherwise=" ".join(str(error).split()))
    return InternalError(f"rollout: the engine did not start{cause}", reason=Reason.ENGINE_DEAD)


def cause_of_death(begin: int, otherwise: str = "") -> str:
    """Returns a clause with the last error in the log from byte `begin` on that names a cause, and the log's path.

    It has `otherwise` if there is no such error, and no path if there is no log.
    """
    errors, path = [otherwise], own_log()
    if path:
        with Path(path).open("rb") as log:
            log.seek(max(begin, os.path.getsize(path) - _MAX_READ_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        errors += [match[1] for line in lines if not _CONSEQUENCE.search(line) and (match := _ERROR.search(line))]
    cause = f": {errors[-1][:_MAX_SHOWN]}" if errors[-1] else ""
    if _MEMORY.search(errors[-1]):
        cause += "; lower rollout.engine.gpu_memory_utilization, rollout.max_samples or rollout.max_model_len"
    return f"{cause}; its log is {path}" if path else cause
