"""What the service does with vLLM for which that has no public method, parameter or setting.

It forks engines from a process that has imported vLLM, because an engine's own import would take 10 to 25 s.
"""

import asyncio
import functools
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, util
from pathlib import Path

import vllm.envs
from packaging.specifiers import SpecifierSet
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.common.compat import require_version
from services.common.errors import InternalError, Reason
from services.rollout.compat.patches import copy_temperatures
from services.rollout.compat.recorded import MASKS, EngineArguments

_LIMITED = SpecifierSet(">=0.26,<0.32")
_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


async def abort_samples(llm: AsyncLLM) -> None:
    """Aborts all samples, and keeps the engine from sampling until `resume_generation`.

    Reason: AsyncLLM.pause_generation would also sleep for 20 ms until the aborted samples have been reported. That is
    not needed here, because each sample reports by itself that it was aborted. Seen with vLLM 0.26.0 and 0.32.0.
    """
    await llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)


def forbid(sampling: SamplingParams, sequences: Sequence[Sequence[int]]) -> SamplingParams:
    """Returns `sampling` without tokens that would complete one of `sequences`.

    Reason: vLLM's `bad_words` are texts, which it splits with a tokenizer that the engines do not load. Seen with vLLM
    0.32.0.
    """
    sampling._bad_words_token_ids = [list(tokens) for tokens in sequences]
    return sampling


def lengths_so_far(llm: AsyncLLM) -> Iterator[tuple[str, int]]:
    """Yields the request id of each unfinished sample, and the number of its tokens that have arrived.

    Reason: a sample is returned only when it is finished, because answers for every token would cost time. vLLM counts
    the tokens, but has no method that tells. Seen with vLLM 0.26.0 and 0.32.0.
    """
    for state in llm.output_processor.request_states.values():
        yield state.external_req_id, state.detokenizer.num_output_tokens() if state.detokenizer else 0


async def stop_reading(llm: AsyncLLM) -> None:
    """Ends the task that reads the engine's outputs; samples in progress fail with EngineDeadError. Call it before
    `shutdown`.

    Reason: AsyncLLM.shutdown ends the engine first, and its task then logs the end as an error with a traceback. Seen
    with vLLM 0.26.0 and 0.32.0.
    """
    if llm.output_handler is not None:  # it is started with the first request
        llm.output_handler.cancel()
        await asyncio.wait({llm.output_handler})
    llm.output_processor.propagate_error(EngineDeadError())


def set_tokenizer(llm: AsyncLLM, directory: Path) -> None:
    """Loads the tokenizer of `directory`, which later requests with `detokenize` use.

    Reason: vLLM loads a tokenizer only at its start, in several processes, and then also checks every prompt with it.
    A run without stop strings needs none, and whether there are any is known only from the requests. Without a
    tokenizer vLLM ignores stop strings, without an error. Seen with vLLM 0.32.0.

    Raises:
        OSError, ValueError: The directory has no tokenizer, or a damaged one.
    """
    llm.output_processor.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


@contextmanager
def suitable_model_runner(arguments: EngineArguments, *, is_gpu: bool) -> Iterator[None]:
    """Makes an engine that is started with `arguments` inside the `with` block use the model runner V1 if V2 cannot do
    what the run needs.

    Reason: vLLM 0.26 runs dense models on GPU with Model Runner V2. Its sampler is not the one that recorded.py hooks,
    and it gives an EAGLE-3 head random weights, because it ignores the load format of drafts. Only an environment
    variable, which spawned engines inherit, chooses the runner. Masks are seen on GPU with vLLM 0.26.0, heads are read
    in its source; 0.32 loads heads with both runners.
    """
    is_hooked = MASKS in (arguments.get("additional_config") or {})
    has_head = (arguments.get("speculative_config") or {}).get("method") == "eagle3"
    if not (is_gpu and (is_hooked or has_head) and require_version("vllm") in _LIMITED):
        yield
        return
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "0"
    try:
        with spawning_engines():
            yield
    finally:
        del os.environ[_VARIABLE]
        if before is not None:
            os.environ[_VARIABLE] = before


def device_capability() -> tuple[int, int] | None:
    """Returns the compute capability of this process's first GPU, or None if it has none.

    Reason: torch would start CUDA to tell it, and an engine could not be forked any more. vLLM asks the driver's
    library, by an object that it does not document. Seen with vLLM 0.26.0 and 0.32.0.
    """
    capability = current_platform.get_device_capability()
    return None if capability is None else (capability.major, capability.minor)


# Modules of the workers of an engine.
CPU_WORKER = "vllm.v1.worker.cpu_worker"
GPU_WORKER = "vllm.v1.worker.gpu_worker"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def fork_engines() -> None:
    """Makes vLLM start its processes from multiprocessing's fork server, which becomes a fork of this process.

    This process must not have used gRPC yet, because a fork does not inherit gRPC's threads, and must not have
    initialized CUDA.

    Reason: multiprocessing would start a new interpreter as its server, which would import everything again, so the
    server is replaced. vLLM has no setting for the fork server; on CPU it sets the start method to spawn. Seen with
    Python 3.11 and vLLM 0.32.0.
    """
    address = os.path.join(util.get_temp_dir(), "engines")  # in a directory that only this user can enter
    server_alive, alive = os.pipe()  # open in this process and all engines; the server ends when all of them have ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(alive)
            _serve(listener.fileno(), server_alive)
    os.close(server_alive)
    taken_over = {"_forkserver_address": address, "_forkserver_alive_fd": alive, "_forkserver_pid": pid}
    vars(forkserver._forkserver).update(taken_over)
    vllm.envs.environment_variables[_METHOD] = lambda: "forkserver"
    _inspect_models_in_forks()  # only now, because the server's forks do it themselves


def register_kernels() -> None:
    """Puts vLLM's functions for CPUs in the place of its Triton kernels, once for all engines that are forked.

    Reason: each engine would look through all modules for them, which takes half of its start. Seen with vLLM 0.32.0.
    """
    if not hasattr(type(current_platform), "register_triton_kernel_overrides"):
        return  # an earlier vLLM, whose platform has None for any name
    copy_temperatures()  # one of these functions is ours
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None


def _inspect_models_in_forks() -> None:
    """Makes vLLM import a model's class in a fork to learn what it supports.

    Reason: vLLM imports the class in a new interpreter, for 10 s, the first time that a host runs it, and keeps what it
    learns in a file. A fork of the server writes the same file. Seen with vLLM 0.26.0 and 0.32.0.
    """
    read = registry._LazyRegisteredModel._load_modelinfo_from_cache

    @functools.wraps(read)
    def read_or_inspect(self: registry._LazyRegisteredModel, module_hash: str) -> registry._ModelInfo | None:
        info = read(self, module_hash)
        if info is None:
            fork = get_context("forkserver").Process(target=_inspect, args=(self,))
            fork.start()
            fork.join()
            info = read(self, module_hash)  # None if the fork failed: vLLM tries it then, and says why
        return info

    registry._LazyRegisteredModel._load_modelinfo_from_cache = read_or_inspect


def _inspect(model: registry._LazyRegisteredModel) -> None:
    load_general_plugins()  # as the new interpreter does: a plugin may register or change models
    registry._run_in_subprocess = lambda function: function()
    model.inspect_model_cls()


def restore_directories() -> None:
    """Makes the directories for temporary files again, if somebody has removed them, as cleaners of /tmp do.

    Raises:
        InternalError: ENGINE_DEAD, the socket at which engines are forked is gone.
    """
    for directory in (tempfile.gettempdir(), util.get_temp_dir()):  # multiprocessing removes the second at its end
        os.makedirs(directory, mode=0o700, exist_ok=True)
    address: str | None = vars(forkserver._forkserver).get("_forkserver_address")
    if forks_engines() and address and not os.path.exists(address):
        raise InternalError(
            f"{address} was removed while the rollout service ran, so it cannot start an engine and ends: start it "
            f"again, and keep {os.path.dirname(address)} from what cleans temporary files",
            reason=Reason.ENGINE_DEAD,
        )


def forks_engines() -> bool:
    """Returns whether vLLM starts its processes as forks of one that has imported it."""
    return vllm.envs.VLLM_WORKER_MULTIPROC_METHOD == "forkserver"


@contextmanager
def spawning_engines() -> Iterator[None]:
    """Makes vLLM start its processes from new interpreters inside the `with` block.

    Reason: a fork server does not see environment variables that are set later. By such variables vLLM may tell each
    data-parallel process its GPUs, and any engine its model runner. Seen on GPU with vLLM 0.26.0.
    """
    before = vllm.envs.environment_variables[_METHOD]
    vllm.envs.environment_variables[_METHOD] = lambda: "spawn"
    try:
        yield
    finally:
        vllm.envs.environment_variables[_METHOD] = before


def _serve(listener: int, alive: int) -> None:
    # An engine forks its workers itself: multiprocessing would start another server for them.
    vllm.envs.environment_variables[_METHOD] = lambda: "fork"
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)
