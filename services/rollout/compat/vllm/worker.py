"""Reads attributes of the vLLM Worker that a worker extension is mixed into.

Reason: vLLM documents how to add an extension (worker_extension_cls), but not which attributes the worker has. Seen
with vLLM 0.26.0 and 0.32.0, on GPU and CPU, with one worker in the engine's process and with a process per worker.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.lora.request import LoRARequest


class ModelRunner(Protocol):
    """Holds the model inside a worker."""

    def get_model(self) -> nn.Module:
        """Returns the live model."""
        ...


class WorkerExtension:
    """Declares attributes of the worker, which has them already. It sets none, because vLLM refuses duplicates."""

    rank: int
    device: torch.device
    model_config: ModelConfig
    vllm_config: VllmConfig
    model_runner: ModelRunner
    add_lora: Callable[[LoRARequest], bool]


def model_of(worker: WorkerExtension) -> nn.Module:
    """Returns the live model."""
    return worker.model_runner.get_model()


def rank_of(worker: WorkerExtension) -> int:
    """Returns the worker's rank among all workers of a replica, over all data-parallel ranks."""
    parallel = worker.vllm_config.parallel_config
    return getattr(parallel, "data_parallel_index", 0) * parallel.world_size + worker.rank


@contextlib.contextmanager
def weight_loading(worker: WorkerExtension) -> Iterator[None]:
    """Sets the context in which vLLM loads weights: no gradients, the worker's device and its config."""
    with torch.no_grad(), torch.device(worker.device), set_current_vllm_config(worker.vllm_config):
        yield
