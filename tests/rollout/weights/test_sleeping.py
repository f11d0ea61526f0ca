"""Tests a worker's steps before and after its sleep, on CPU: weights are overwritten, and new ones can be received."""

import pytest
import torch
from torch import nn

from services.rollout.compat.worker import KV_CACHE, WEIGHTS, plain_tensors
from tests.rollout.toy_engine import Toy, Worker, adapter

BUCKET_BYTES = 600


def contents(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in worker.model.named_parameters()}


def sleep_and_wake(worker: Worker) -> None:
    worker.lockstep_before_sleep()
    assert worker.lockstep_memory([WEIGHTS, KV_CACHE])["resident_bytes"] == 0
    assert all(not tensor.any() for tensor in contents(worker).values())
    assert worker.lockstep_memory([KV_CACHE])["resident_bytes"] > 0


# After none it loads and records, after one it checks, after two and more it copies directly into its buffers.
@pytest.mark.parametrize("num_before", range(4))
def test_weights_arrive_after_a_sleep_as_without_one(num_before: int):
    slept, other = Worker(Toy(), BUCKET_BYTES), Worker(Toy(), BUCKET_BYTES)
    for seed in range(num_before):
        slept.publish(seed)
        assert all(tensor.any() for tensor in contents(slept).values())
    sleep_and_wake(slept)
    for seed in range(10, 14):
        assert slept.publish(seed)["digest"] == other.publish(seed)["digest"]
        for name, tensor in contents(other).items():
            assert torch.equal(contents(slept)[name], tensor), name
        if seed == 11:
            sleep_and_wake(slept)
    assert slept.loading.reads_in_place


def test_nothing_keeps_the_buffers_during_the_sleep():
    worker = Worker(Toy(), BUCKET_BYTES)
    for seed in range(3):
        worker.publish(seed)
    copies = worker.loading._map._copies
    assert copies
    worker.lockstep_before_sleep()
    assert not copies
    assert not worker.buffers


def test_a_base_that_was_dropped_is_sent_again():
    worker = Worker(Toy(), BUCKET_BYTES)
    worker.set_adapter_plan(BUCKET_BYTES)
    first = worker.publish_adapter(1, 1, sender_sums=(0, 0))
    sums = worker.base_sums
    assert worker.publish_adapter(1, 2, sender_sums=sums)["num_bytes"] < first["num_bytes"]
    sleep_and_wake(worker)
    again = worker.publish_adapter(1, 2, sender_sums=sums)
    assert again["num_bytes"] == first["num_bytes"]
    assert worker.base_sums == sums
    assert all(tensor.any() for tensor in contents(worker).values())
    assert all(torch.equal(worker.adapter[name], tensor) for name, tensor in adapter(2))


def test_what_neither_a_publication_nor_vllm_brings_back_is_found():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 2))
            self.first_row = self.weight.data[0]
            self.register_buffer("cache", torch.ones(3))
            self.scale = torch.tensor(2.0)
            self.stacks = (torch.ones(2), torch.ones(3))
            self.empty = torch.tensor([])

    model = nn.Sequential(Layer())
    kernel = type("Kernel", (), {"__module__": "vllm.v1.attention"})()
    kernel.alibi_slopes = torch.ones(5)
    model[0].impl = kernel
    assert sorted(tensor.numel() for tensor in plain_tensors(model)) == [1, 2, 3, 5]
