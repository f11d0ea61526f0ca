"""Tests that a quantized engine has what vLLM's reload makes of the received weights, and how its hash tells."""

from collections.abc import Iterator

import pytest
import torch
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

from services.common.config.rollout import RolloutConfig
from services.common.errors import PreconditionFailed, Reason
from services.rollout import arguments, loading, quantizing
from services.rollout.arguments import check_precision, engine_arguments
from services.rollout.compat.worker import Rows, reload_weights
from services.rollout.quantizing import LayerMap, QuantizedTensors
from tests.rollout.toy_engine import CPU, Online, Toy, Worker, checkpoint, quantize_rows
from tests.support import raises

# One bucket for each tensor, buckets of several tensors, and one bucket for all.
BUCKET_BYTES = [1, 700, 1 << 20]


def fresh(seed: int) -> Toy:
    """Returns a new engine into which vLLM has loaded `checkpoint(seed)`."""
    model = Toy(quantizes=True)
    reload_weights(model, None, dict(checkpoint(seed)).items())
    return model


def quantized_digest(model: Toy) -> str:
    return QuantizedTensors.of(model, CPU).digest()


def assert_exact(worker: Worker, seed: int, published: dict) -> None:
    assert "error" not in published, published
    ours, theirs = worker.model.state_dict(), fresh(seed).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert ours[name].stride() == tensor.stride(), name
    assert ours["qkv.weight"].dtype is torch.int8
    assert ours["embed.weight"].dtype is torch.float32
    assert published["quantized_digest"] == quantized_digest(fresh(seed)) != ""


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_it_has_what_a_reload_makes_of_the_same_weights(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch):
    worker = Worker(Toy(quantizes=True), bucket_bytes)
    addresses = {name: tensor.data_ptr() for name, tensor in worker.model.state_dict().items()}
    digests = []
    for seed in (1, 2):
        assert not worker.loading.reads_in_place
        published = worker.publish(seed)
        assert worker.loading._map is not None, worker.loading._problem
        assert_exact(worker, seed, published)
        digests.append(published["quantized_digest"])
    assert worker.loading.reads_in_place, worker.loading._problem
    monkeypatch.setattr(loading, "reload_weights", None)
    for seed in (3, 4, 1):
        published = worker.publish(seed)
        assert_exact(worker, seed, published)
        digests.append(published["quantized_digest"])
    assert digests[0] == digests[-1]  # of the same weights, whichever way they came
    assert len(set(digests)) == 4
    # The addresses are the same as before, because captured CUDA graphs read there.
    assert {name: tensor.data_ptr() for name, tensor in worker.model.state_dict().items()} == addresses


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
def test_a_publication_that_breaks_off_is_made_good_by_the_next(num_before: int):
    worker = Worker(Toy(quantizes=True), 700)
    for seed in range(num_before):
        worker.publish(seed)
    is_direct = worker.loading.reads_in_place
    for breaks_after in range(worker.num_buckets):
        assert "Broken" in worker.publish(10, breaks_after=breaks_after)["error"]
        assert worker.loading.reads_in_place == is_direct
    for seed in (20, 21, 22):
        assert_exact(worker, seed, worker.publish(seed))
    assert worker.loading.reads_in_place


def test_every_layer_is_quantized_once_and_few_at_a_time():
    worker = Worker(Toy(quantizes=True), 1)
    methods = [layer.quant_method for layer in worker.model.children() if isinstance(layer.quant_method, Online)]
    before = [method.num_calls for method in methods]
    for number, seed in enumerate((1, 2, 3, 4), 1):
        worker.publish(seed)
        assert [method.num_calls - calls for method, calls in zip(methods, before, strict=True)] == [number] * 5
        assert all("process_weights_after_loading" not in vars(method) for method in methods)


def _num_calls(worker: Worker) -> dict[str, int]:
    layers = worker.model.named_children()
    return {name: layer.quant_method.num_calls for name, layer in layers if isinstance(layer.quant_method, Online)}


# Whole rows arrive of these. Of the others a rank has columns, or several matrices.
_BY_ROWS = {"qkv", "gate_up", "odd"}


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_rows_are_quantized_to_where_kernels_read(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantizing, "row_quantizer", lambda layer: quantize_rows)
    worker = Worker(Toy(quantizes=True), bucket_bytes)
    addresses = {name: tensor.data_ptr() for name, tensor in worker.model.state_dict().items()}
    digests = [worker.publish(seed)["quantized_digest"] for seed in (1, 2)]
    before = _num_calls(worker)
    for seed in (3, 4, 1):
        published = worker.publish(seed)
        assert_exact(worker, seed, published)
        digests.append(published["quantized_digest"])
    assert digests[0] == digests[-1]
    assert {name for name, calls in _num_calls(worker).items() if calls == before[name]} == _BY_ROWS
    assert {name: tensor.data_ptr() for name, tensor in worker.model.state_dict().items()} == addresses
    assert "Broken" in worker.publish(10, breaks_after=worker.num_buckets // 2)["error"]
    assert_exact(worker, 11, worker.publish(11))


def _scaled_down(rows: torch.Tensor, target: Rows | None = None, /) -> Rows:
    made = quantize_rows(rows, target)
    made[1].mul_(1 - 1e-7)
    return made


def test_rows_that_vllm_quantizes_otherwise_are_left_to_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantizing, "row_quantizer", lambda layer: _scaled_down)
    worker = Worker(Toy(quantizes=True), 700)
    before = _num_calls(worker)
    for number, seed in enumerate((1, 2, 3, 4), 1):
        assert_exact(worker, seed, worker.publish(seed))
        assert {calls - before[name] for name, calls in _num_calls(worker).items()} == {number}


def _swapped(self: LayerMap, index: int) -> list[torch.Tensor]:
    parts = _LOADED(self, index)
    return parts[::-1] if len({part.shape for part in parts}) == 1 else parts


_LOADED = LayerMap.loaded


def test_a_map_that_puts_weights_elsewhere_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LayerMap, "loaded", _swapped)  # gate and up are one another's
    worker = Worker(Toy(quantizes=True), 1 << 20)
    worker.publish(1)
    assert worker.loading._map is not None
    for seed in (2, 3):
        assert_exact(worker, seed, worker.publish(seed))
        assert not worker.loading.reads_in_place
        assert "wrote other bytes than the recorded copies would" in worker.loading._problem


def _changes(model: Toy) -> Iterator[torch.Tensor]:
    yield model.qkv.weight.data
    yield model.qkv.weight_scale.data.view(torch.int32)
    yield model.experts.w2.data


@pytest.mark.parametrize("small_bytes", [0, 100, 1 << 20])
def test_the_hash_tells_any_change_of_what_was_quantized(small_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantizing, "_SMALL_BYTES", small_bytes)
    model = fresh(1)
    digests = {quantized_digest(model)}
    for tensor in _changes(model):
        tensor[(0,) * tensor.ndim] += 1
        digests.add(quantized_digest(model))
    assert len(digests) == 4
    model.embed.weight.data.add_(1)  # which is not quantized: the stamp is its hash
    assert quantized_digest(model) in digests
    model.o.weight.data = model.o.weight.data.contiguous()  # other memory behind the same numbers
    assert quantized_digest(model) not in digests
    assert quantized_digest(Toy()) == ""


def test_an_engine_whose_quantization_differs_reports_another_hash(monkeypatch: pytest.MonkeyPatch):
    """Tests what two replicas report for the same publication if one has another kernel."""
    workers = [Worker(Toy(quantizes=True), 700) for _ in range(2)]
    method = workers[1].model.gate_up.quant_method
    method._process = lambda layer, process=method._process: (process(layer), layer.weight_scale.data.mul_(1 + 2e-7))
    for seed in (1, 2, 3):
        one, other = (worker.publish(seed) for worker in workers)
        assert one["digest"] == other["digest"]
        assert one["quantized_digest"] != other["quantized_digest"]


ARGUMENTS = {
    "precision": {"quantization": "fp8_per_channel", "moe_backend": "triton"},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("key", ARGUMENTS)
def test_float8_is_asked_for_in_the_engines_arguments_and_refused_on_cpu(key: str):
    config = RolloutConfig(**{key: "fp8"})
    plain, made = (engine_arguments(one, "m", 0) for one in (RolloutConfig(), config))
    added = {name: value for name, value in made.items() if name not in plain or plain[name] != value}
    assert added.items() >= ARGUMENTS[key].items()
    assert added.keys() <= {"quantization", "quantization_config", "moe_backend", "kv_cache_dtype"}
    with raises(PreconditionFailed, reason=Reason.UNSUPPORTED_VERSION, field=f"rollout.{key}") as refused:
        check_precision(config)
    assert f"set rollout.{key} to auto" in refused.value.message
    check_precision(RolloutConfig())


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_float8_needs_a_gpu_that_has_it(capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arguments, "device_capability", lambda: capability)
    config = RolloutConfig(precision="fp8")
    if is_refused:
        with raises(PreconditionFailed, reason=Reason.UNSUPPORTED_VERSION, field="rollout.precision"):
            check_precision(config)
    else:
        check_precision(config)


def test_vllm_leaves_routers_as_they_are():
    made = engine_arguments(RolloutConfig(precision="fp8"), "m", 0)
    config = OnlineQuantizationConfig(resolve_quantization_config(made["quantization"], made["quantization_config"]))
    names = {
        "model.layers.3.mlp.gate": True,
        "model.layers.3.mlp.router": True,
        "model.layers.3.mlp.gate_up_proj": False,
    }
    for name, is_left in names.items():
        assert should_ignore_layer(name, ignore=config.ignored_layers) == is_left
    assert config.args.linear and config.args.moe
