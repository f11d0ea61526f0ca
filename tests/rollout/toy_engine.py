"""Provides an engine worker with a small model, for what cannot be seen in vLLM on CPU, where it packs its weights.

The layers, and how their weights are loaded, are like vLLM's; the layerwise reload and the receiver are the real ones.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from services.common.weights.buckets import Sums, pack
from services.common.weights.plan import Bucket, NamedTensors, Plan
from services.rollout.compat.worker import Rows
from services.rollout.receiver import WeightReceiver

CPU = torch.device("cpu")
TP_RANK, TP_SIZE = 1, 2
HIDDEN, HEAD, INNER, VOCAB, PADDED_VOCAB, EXPERTS = 12, 5, 14, 21, 32, 3
Loader = Callable[..., None]


class Method(QuantizeMethodBase):
    """Has what vLLM calls after it has loaded a layer: `process`, which changes the layer or does nothing."""

    def __init__(self, process: Callable[[nn.Module], None]):
        self._process = process

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._process(layer)


def method(name: str, process: Callable[[nn.Module], None] = lambda layer: None) -> Method:
    return type(name, (Method,), {})(process)


class Online(Method):
    """Quantizes what was loaded, in vLLM's way: the weight becomes transposed int8, beside the scale of each row."""

    uses_meta_device = True

    def __init__(self) -> None:
        super().__init__(_quantize)
        self.num_calls = 0

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.num_calls += 1
        super().process_weights_after_loading(layer)


def _quantize(layer: nn.Module) -> None:
    for name in [name for name in dict(layer.named_parameters()) if name != "bias"]:
        quantized, scale = quantize_rows(getattr(layer, name).data)
        setattr(layer, name, nn.Parameter(quantized.transpose(-1, -2), requires_grad=False))
        layer.register_parameter(f"{name}_scale", nn.Parameter(scale, requires_grad=False))


def quantize_rows(rows: torch.Tensor, target: Rows | None = None, /) -> Rows:
    """Makes rows int8, with a scale for each."""
    weight = rows.float()
    scale = weight.abs().amax(-1, keepdim=True) / 127
    made = (weight / scale).round().to(torch.int8), scale
    for into, new in zip(target or made, made, strict=True):
        into.copy_(new)
    return target or made


class Layer(nn.Module):
    """Parameters, each with its loader, and what is done with them after loading."""

    def __init__(self, quant_method: Method | None = None, **parameters: tuple[torch.Tensor, Loader | None]):
        super().__init__()
        self.quant_method = quant_method
        for name, (tensor, loader) in parameters.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            if loader:
                parameter.weight_loader = loader
            self.register_parameter(name, parameter)


def into_rows(begins: dict[str, int]) -> Loader:
    """Returns a loader that puts this rank's rows of q, k and v, or of gate and up, below each other."""

    def load(param: torch.Tensor, loaded: torch.Tensor, part: str) -> None:
        rows = loaded.shape[0] // TP_SIZE
        param.data.narrow(0, begins[part], rows).copy_(loaded.narrow(0, TP_RANK * rows, rows))

    return load


def own_columns(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded.narrow(1, TP_RANK * param.shape[1], param.shape[1]))


def padded_rows(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param[: loaded.shape[0]].data.copy_(loaded)
    param[loaded.shape[0] :].data.fill_(0)


def one_expert(param: torch.Tensor, loaded: torch.Tensor, expert: int, part: str) -> None:
    rows = param.shape[1] // 2
    mine = param.data[expert] if part == "down" else param.data[expert].narrow(0, rows * (part == "up"), rows)
    mine.copy_(loaded)


# Checkpoint name -> name of the parameter and arguments of its loader.
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "embed.weight": ("embed.weight", {}),
    "norm.weight": ("norm.weight", {}),
    "o.weight": ("o.weight", {}),
    "odd.weight": ("odd.weight", {}),
    **{f"{part}.{kind}": (f"qkv.{kind}", {"part": part}) for part in "qkv" for kind in ("weight", "bias")},
    **{f"{part}.weight": ("gate_up.weight", {"part": part}) for part in ("gate", "up")},
    **{
        f"experts.{index}.{part}": (f"experts.{'w2' if part == 'down' else 'w13'}", {"expert": index, "part": part})
        for index in range(EXPERTS)
        for part in ("gate", "up", "down")
    },
}


def onto_themselves(layer: nn.Module) -> None:
    """Copies parameters onto themselves, as vLLM does after reloading experts whose kernel takes them as they are."""
    for parameter in layer.parameters(recurse=False):
        parameter.data.copy_(parameter.data)


class Toy(nn.Module):
    """One rank's part of the model; `odd` is a layer that may do more than copy when it is loaded.

    With `quantizes`, linear layers and experts are quantized, each by a method of its own.
    """

    def __init__(self, odd: Layer | None = None, *, quantizes: bool = False):
        super().__init__()
        filler, bf16 = torch.full, {"dtype": torch.bfloat16}
        linears: Iterator[Method] = iter(lambda: Online() if quantizes else method("UnquantizedLinearMethod"), None)
        experts = Online() if quantizes else method("UnquantizedFusedMoEMethod", onto_themselves)
        qkv = into_rows({"q": 0, "k": HEAD, "v": 2 * HEAD})
        self.embed = Layer(
            method("UnquantizedEmbeddingMethod"), weight=(filler((PADDED_VOCAB, HIDDEN), 7.0), padded_rows)
        )
        self.norm = Layer(weight=(filler((HIDDEN,), 7.0), None))
        self.qkv = Layer(
            next(linears), weight=(filler((3 * HEAD, HIDDEN), 7.0, **bf16), qkv), bias=(filler((3 * HEAD,), 7.0), qkv)
        )
        self.o = Layer(next(linears), weight=(filler((HIDDEN, HEAD), 7.0), own_columns))
        gate_up = into_rows({"gate": 0, "up": INNER // TP_SIZE})
        self.gate_up = Layer(next(linears), weight=(filler((INNER, HIDDEN), 7.0), gate_up))
        self.experts = Layer(
            experts,
            w13=(filler((EXPERTS, 6, HIDDEN), 7.0, **bf16), one_expert),
            w2=(filler((EXPERTS, HIDDEN, 3), 7.0, **bf16), one_expert),
        )
        self.odd = odd or Layer(next(linears), weight=(filler((4, 6), 7.0), None))
        self.head = Layer(method("UnquantizedEmbeddingMethod"))
        self.head.weight = self.embed.weight
        record_metadata_for_reloading(self)
        for layer in self.modules() if quantizes else [self.odd]:
            if isinstance(quant_method := getattr(layer, "quant_method", None), Method):
                quant_method.process_weights_after_loading(layer)

    def load_weights(self, weights: NamedTensors) -> None:
        for name, tensor in weights:
            target, arguments = NAMES[name]
            parameter = self.get_parameter(target)
            parameter.weight_loader(parameter, tensor, **arguments)


def checkpoint(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Returns all weights of all ranks, other ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    qkv_rows, bf16 = TP_SIZE * HEAD, torch.bfloat16
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"embed.weight": ((VOCAB, HIDDEN), torch.float32)}
    for part in "qkv":
        shapes |= {f"{part}.weight": ((qkv_rows, HIDDEN), bf16), f"{part}.bias": ((qkv_rows,), torch.float32)}
    shapes |= {"o.weight": ((HIDDEN, qkv_rows), torch.float32), "norm.weight": ((HIDDEN,), torch.float32)}
    shapes |= {f"{part}.weight": ((INNER, HIDDEN), torch.float32) for part in ("gate", "up")}
    for index in range(EXPERTS):
        for part in ("gate", "up", "down"):
            shapes[f"experts.{index}.{part}"] = ((HIDDEN, 3) if part == "down" else (3, HIDDEN), bf16)
    shapes["odd.weight"] = ((4, 6), torch.float32)
    return [(name, torch.randn(shape, generator=generator).to(dtype)) for name, (shape, dtype) in shapes.items()]


ADAPTER_CONFIG = '{"r": 2}'


def adapter(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Returns some adapter tensors, other ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"A": (2, HIDDEN), "B": (HIDDEN, 2)}
    return [
        (f"base_model.model.{part}.lora_{kind}.weight", torch.randn(shape, generator=generator))
        for part in "qkv"
        for kind, shape in shapes.items()
    ]


class Broken(Exception):
    """Ends a publication before its last bucket."""


class Wire:
    """Takes the group's place: a bucket arrives when it is asked for, unseen by torch's dispatcher as from a network.

    Buckets that are read in place arrive in `buffers`, the same three in all publications.
    """

    def __init__(
        self, flats: Iterable[torch.Tensor], breaks_after: int | None, buffers: list[torch.Tensor], agrees: bool = False
    ):
        self._flats, self._left, self._agrees = iter(flats), breaks_after, agrees
        self._buffers = buffers
        self._is_reading = False
        self.acknowledged: list[str] = []

    def agrees(self, values: Sums) -> bool:
        return self._agrees

    def receive(self, buckets: Sequence[Bucket], *, in_place: bool) -> Iterator[tuple[Bucket, torch.Tensor]]:
        for index, bucket in enumerate(buckets):
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    raise Broken
            sent = next(self._flats)
            assert sent.numel() == bucket.num_bytes
            if in_place and not (self._buffers and self._buffers[0].numel() >= bucket.num_bytes):
                most = max(bucket.num_bytes for bucket in buckets)
                self._buffers[:] = [torch.empty(most, dtype=torch.uint8) for _ in range(3)]
            flat = self._buffers[index % 3] if in_place else torch.empty(bucket.num_bytes, dtype=torch.uint8)
            ctypes.memmove(flat.data_ptr(), sent.data_ptr(), sent.numel())
            self._is_reading = True
            yield bucket, flat[: bucket.num_bytes]
            self._is_reading = False

    def free_buffers(self) -> bool:
        self._buffers.clear()
        return True

    def acknowledge(self, version: int, digest: str) -> None:
        assert not self._is_reading, "a pair tells the sender that a bucket was read when the next is asked for"
        self.acknowledged.append(digest)

    def kill(self) -> None: ...

    def abort(self) -> None: ...


class Worker(WeightReceiver):
    """Has what the receiver knows of vLLM's Worker."""

    def __init__(self, model: Toy, bucket_bytes: int):
        self.model, self.device, self.rank = model, CPU, 0
        self.vllm_config, self.model_config = VllmConfig(), SimpleNamespace(dtype=torch.float32)
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.set_bucket_bytes(bucket_bytes)

    def set_bucket_bytes(self, bucket_bytes: int) -> None:
        self.buffers: list[torch.Tensor] = []
        self._lockstep_set_plan(Plan.of(checkpoint(0), bucket_bytes=bucket_bytes).message.SerializeToString())

    @property
    def loading(self) -> Any:
        return self._lockstep_loading

    @property
    def num_buckets(self) -> int:
        return len(self._lockstep_plan.buckets)

    def set_adapter_plan(self, bucket_bytes: int) -> None:
        self.buffers = []
        plan = Plan.with_adapter(
            checkpoint(0), adapter(0), adapter_config_json=ADAPTER_CONFIG, bucket_bytes=bucket_bytes
        )
        self._lockstep_set_plan(plan.message.SerializeToString())

    def add_lora(self, request: LoRARequest) -> bool:
        """Loads the adapter in the place of vLLM's method; its directory is deleted when this returns."""
        directory = Path(request.lora_path)
        assert request.load_inplace
        assert (directory / "adapter_config.json").read_text() == ADAPTER_CONFIG
        self.adapter = load_file(directory / "adapter_model.safetensors")
        return True

    @property
    def base_sums(self) -> Sums:
        return self._lockstep_base_sums

    def publish_adapter(
        self, base_seed: int, adapter_seed: int, *, sender_sums: Sums, breaks_after: int | None = None
    ) -> dict[str, Any]:
        """Receives `adapter(adapter_seed)`, after `checkpoint(base_seed)` unless it holds that with `sender_sums`."""
        skips_base = sender_sums == self.base_sums != (0, 0)
        weights = [*([] if skips_base else checkpoint(base_seed)), *adapter(adapter_seed)]
        flats = (flat for _, flat in pack(self._lockstep_plan, weights, CPU, skips_base=skips_base))
        self._lockstep_group = Wire(flats, breaks_after, self.buffers, sender_sums == self.base_sums)
        return self.lockstep_receive(adapter_seed)

    def publish(self, seed: int, *, breaks_after: int | None = None) -> dict[str, Any]:
        """Receives `checkpoint(seed)`, or only its first buckets."""
        flats = (flat for _, flat in pack(self._lockstep_plan, checkpoint(seed), CPU))
        self._lockstep_group = Wire(flats, breaks_after, self.buffers)
        return self.lockstep_receive(seed)
