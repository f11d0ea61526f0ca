"""Reads what a worker extension needs from the vLLM Worker that it is mixed into.

Reason: vLLM documents how to add an extension (worker_extension_cls), but not which attributes the worker has. Seen
with vLLM 0.26.0 and 0.32.0, on GPU and CPU, with one worker in the engine's process and with a process per worker.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config


def model_of(worker: Any) -> nn.Module:
    """Returns the live model."""
    return worker.model_runner.get_model()


def rank_of(worker: Any) -> int:
    """Returns the worker's rank among all workers of a replica, over all data-parallel ranks."""
    parallel = worker.vllm_config.parallel_config
    return getattr(parallel, "data_parallel_index", 0) * parallel.world_size + worker.rank


@contextlib.contextmanager
def weight_loading(worker: Any) -> Iterator[None]:
    """Sets the context in which vLLM loads weights: no gradients, the worker's device and its config."""
    with torch.no_grad(), torch.device(worker.device), set_current_vllm_config(worker.vllm_config):
        yield
