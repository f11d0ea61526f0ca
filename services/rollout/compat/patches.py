"""Changes that every process of an engine makes to vLLM itself, when vLLM loads the plugin (plugin.py)."""

import contextlib
import copy
import functools
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from vllm.config import ModelConfig
from vllm.platforms import current_platform
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from services.common.compat import require_version

_COPIES_INTEGERS_ONLY = SpecifierSet(">=0.32,<0.33")


def patch_vllm() -> None:
    """Makes all changes of this module, in this process."""
    ignore_model_path()
    copy_temperatures()
    end_at_stop_strings()
    tell_stages()
    keep_sockets_together()


def ignore_model_path() -> None:
    """Lets all engines of a model use what vLLM compiled for one, in this process.

    Reason: vLLM looks compiled models up by a hash of its config, which includes the model's path. Every engine has its
    model card in a folder of its own, so each start would compile again, for a minute or more. What the card contains
    is in the hash as well. Seen with vLLM 0.26.0 (CUDA) and 0.32.0 (CPU).
    """
    with_path = ModelConfig.compute_hash
    if hasattr(with_path, "__wrapped__"):
        return

    @functools.wraps(with_path)
    def compute_hash(self: ModelConfig) -> str:
        anonymous = copy.copy(self)
        anonymous.model = ""
        return with_path(anonymous)

    ModelConfig.compute_hash = compute_hash


def copy_temperatures() -> None:
    """Gives every drafted token the temperature of its sample, which vLLM on CPU does not do.

    It replaces vLLM's function in this process. vLLM must not have registered its functions yet.

    Reason: to verify the drafted tokens of speculative decoding, vLLM divides their logits by the temperatures of their
    samples, which it first copies to all of their tokens. On GPU a Triton kernel copies them. vLLM 0.32's function for
    CPU copies integers only: it converts the float32 output to a new int64 tensor, fills that one and drops it. The
    logits are then divided by whatever the memory had held. Their log-probabilities are NaN or wrong, and tokens are
    accepted with wrong probabilities. top_p is lost in the same way. Seen with vLLM 0.32.0 on CPU.
    """
    if not current_platform.is_cpu() or require_version("vllm") not in _COPIES_INTEGERS_ONLY:
        return
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand


def expand(  # the arguments of vLLM's kernel
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Copies each sample's value [samples] to `output` [tokens]; `cu_num_tokens` [samples] are sums of their tokens."""
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.repeat_interleave(counts))


def end_at_stop_strings() -> None:
    """Makes vLLM drop the tokens of a message that follow the one which completes a stop string, in this process.

    Reason: the engine sends several tokens at once (scheduler.py), and may have several drafts accepted in a step. vLLM
    0.26 ends the text at the stop string, but keeps all tokens. Later versions drop them. The log-probabilities of a
    dropped token stay; sampling.py leaves them out.
    """
    if not hasattr(OutputProcessor, "_trim_surplus_tokens"):
        add_one_by_one(BaseIncrementalDetokenizer)


def add_one_by_one(kind: type[BaseIncrementalDetokenizer]) -> None:
    """Makes detokenizers add new tokens one by one, up to a stop string; a second call changes nothing."""
    add = kind.update
    if hasattr(add, "__wrapped__"):
        return

    @functools.wraps(add)
    def update(self: BaseIncrementalDetokenizer, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        if not self.stop:
            return add(self, new_token_ids, stop_terminated)
        last = len(new_token_ids) - 1
        ends = (add(self, [token], stop_terminated and i == last) for i, token in enumerate(new_token_ids))
        return next(filter(None, ends), None)

    kind.update = update


# A Unix socket beside the model card, where an engine's process tells what it begins.
STAGES_SOCKET = "stages"


def tell_stages() -> None:
    """Makes an engine's process tell when it begins to measure memory, which compiles the model, and to set up caches,
    after which it captures CUDA graphs. Before, it loads the model.

    Reason: an engine may take minutes to start, and vLLM only logs what it does. Seen with vLLM 0.26.0 (CUDA) and
    0.32.0 (CPU).
    """
    for method, stage in (
        ("determine_available_memory", "compile the model and measure its memory"),
        ("initialize_from_config", "set up caches and warm up"),
    ):
        _do_before(Executor, method, functools.partial(_send_stage, stage))


def keep_sockets_together() -> None:
    """Makes the sockets between an engine and its workers in the directory that the service removes with the engine.

    Reason: vLLM never removes them, and a process forked for an engine does not see the service's environment. Seen
    with vLLM 0.32.0.
    """

    def beside_model_card(executor: Executor) -> None:
        os.environ["VLLM_RPC_BASE_PATH"] = executor.model_config.model

    _do_before(MultiprocExecutor, "_init_executor", beside_model_card)


def _send_stage(stage: str, executor: Executor) -> None:
    path = os.path.join(executor.model_config.model, STAGES_SOCKET)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):  # nobody listens
        sender.sendto(stage.encode(), path)


def _do_before(kind: type[Executor], method: str, action: Callable[[Executor], None]) -> None:
    """Makes `method` of the executors of a kind call `action` first; a second call changes nothing."""
    original = getattr(kind, method)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def after_action(self: Executor, *args: Any, **kwargs: Any) -> Any:
        action(self)
        return original(self, *args, **kwargs)

    setattr(kind, method, after_action)
