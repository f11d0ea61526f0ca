"""Tests what an engine's worker is estimated to hold."""

from services.common.families.architecture import Architecture
from services.coordinator.checks.engine import engine_resident, weights_of_engine
from tests.coordinator.fake_services import make_config

MODEL = Architecture("llama", 2, 64, 4, 2, 16, 256, 512, True, intermediate_size=128)
GIB = 2**30


def test_weights_have_the_dtype_of_the_device_and_are_cut() -> None:
    count = MODEL.num_parameters
    assert weights_of_engine(make_config(), MODEL, is_gpu=False) == 4 * count
    assert weights_of_engine(make_config(rollout={"tensor_parallel_size": 2}), MODEL, is_gpu=True) == count
    assert weights_of_engine(make_config(rollout={"dtype": "float32"}), MODEL, is_gpu=True) == 4 * count


def test_the_cache_follows_from_the_engine_arguments() -> None:
    count = MODEL.num_parameters
    assert engine_resident(make_config(), MODEL) == 4 * count + GIB // 4
    given = make_config(rollout={"engine": {"kv_cache_memory_bytes": GIB}})
    assert engine_resident(given, MODEL, device_bytes=80 * GIB) == 2 * count + GIB
    half = make_config(rollout={"engine": {"gpu_memory_utilization": 0.5}})
    assert engine_resident(half, MODEL, device_bytes=80 * GIB) == 40 * GIB
