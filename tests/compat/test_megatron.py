"""Tests the internals of Megatron-Core that the trainer uses, and that each patch is still needed."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import services.trainer.compat.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core import jit, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from services.trainer.compat.megatron.attention import (
    DuplicatedLinear,
    RMSNorm,
    SDPAttention,
    with_torch_modules,
    zigzag,
)
from services.trainer.compat.megatron.model import HiddenStateModel, _Replay, add_gradients_in_place, take_apart
from services.trainer.compat.megatron.state import (
    NO_GROUPS,
    current_groups,
    set_groups,
    share_hybrid,
    take_range,
    torch_tensors,
)
from services.trainer.compat.torch import set_class
from tests.support import ROOT

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the shim does nothing")
MEGATRON = Path(inspect.getfile(parallel_state)).parent


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def config(**given: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, persist_layer_norm=False, normalization="RMSNorm", **given
    )


# ---- cpu_shim

UNSHIMMED = """
import json, torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils

def error_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return ""

print(json.dumps({
    "seed": error_of(lambda: random.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)),
    "generator": error_of(random._get_cuda_rng_state),
    "gemm": hasattr(moe_utils, "te_general_gemm"),
    "sizes": type(moe_utils.maybe_move_tensor_to_cpu(torch.ones(1), as_numpy=True)).__name__,
    "type": torch.zeros(1).type(),
    "cuda": error_of(lambda: torch.zeros(1).cuda()),
}))
"""


@pytest.mark.long
@on_cpu
def test_without_the_shim_megatron_asks_for_a_gpu() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", UNSHIMMED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["seed"] and said["generator"] and said["cuda"]
    assert said["gemm"] is False and said["sizes"] == "Tensor" and said["type"] == "torch.FloatTensor"


@on_cpu
def test_with_the_shim_it_does_not() -> None:
    assert parallel_state.torch is not torch
    assert parallel_state.torch.cuda.current_device() == torch.device("cpu")
    assert parallel_state.torch.zeros(1, device="cuda", pin_memory=True).device.type == "cpu"
    assert torch.zeros(1).cuda().device.type == "cpu" and torch.zeros(1).type() == "torch.cuda.FloatTensor"
    megatron_random.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    assert moe_utils.te_general_gemm is None
    assert type(moe_utils.maybe_move_tensor_to_cpu(torch.ones(1), as_numpy=True)).__name__ == "ndarray"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")  # torch itself is as it was


@on_cpu
def test_with_the_shim_it_takes_no_optimizer_that_needs_a_gpu(tmp_path: Path) -> None:
    """`lockstep export` runs on CPU, also where TransformerEngine is installed."""
    optimizers = tmp_path / "transformer_engine" / "pytorch" / "optimizers"
    optimizers.mkdir(parents=True)
    for package in (optimizers, *list(optimizers.parents)[:2]):
        (package / "__init__.py").write_text("__version__ = '2.12.0'\nFusedAdam = multi_tensor_scale = object\n")
    program = (
        "import services.trainer.compat.megatron; from megatron.core import optimizer as o; print(o.Adam.__module__)"
    )
    command, environ = (
        [sys.executable, "-W", "ignore", "-c", program],
        os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.stdout.startswith("torch.optim."), done.stdout + done.stderr


def test_what_the_shim_replaces_is_called_like_this() -> None:
    source = {
        name: (MEGATRON / f"{name}.py").read_text() for name in ("tensor_parallel/random", "transformer/moe/moe_utils")
    }
    found = {
        node.name: [argument.arg for argument in node.args.args]
        for text in source.values()
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }
    assert found["_get_cuda_rng_state"] == names(megatron_random._get_cuda_rng_state)
    assert len(found["_set_cuda_rng_state"]) == len(names(megatron_random._set_cuda_rng_state))
    assert found["maybe_move_tensor_to_cpu"] == names(moe_utils.maybe_move_tensor_to_cpu)
    assert "te_general_gemm" in source["transformer/moe/moe_utils"]
    assert names(jit.disable_jit_fuser) == []
    for optimizer in (DistributedOptimizer, Float16OptimizerWithFloat16Params):
        assert "torch.cuda.FloatTensor" in inspect.getsource(optimizer)


# ---- attention: on CPU


def test_the_local_norm_knows_no_sequence_parallelism() -> None:
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config(sequence_parallel=True, tensor_model_parallel_size=2), 64)


def test_the_local_attention_knows_no_context_parallelism_and_no_packs() -> None:
    arguments = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    with pytest.raises(AssertionError, match=r"[Cc]ontext parallelism"):
        DotProductAttention(config(context_parallel_size=2), **arguments)
    assert "assert packed_seq_params is None" in inspect.getsource(DotProductAttention.forward)


def test_the_local_spec_is_made_of_them() -> None:
    spec = get_gpt_decoder_block_spec(config(), use_transformer_engine=False, normalization="RMSNorm", pp_rank=0)
    weak = {WrappedTorchNorm.__name__, DotProductAttention.__name__}
    assert all(name in repr(spec) for name in weak)
    replaced = repr(with_torch_modules(spec))
    assert not any(name in replaced for name in weak)
    assert RMSNorm.__name__ in replaced and SDPAttention.__name__ in replaced


def test_latent_attention_cuts_its_latents_and_takes_a_layer_that_it_does_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multi_latent_attention, "TELinear", nn.Linear)  # as if TransformerEngine were there
    spec = get_gpt_decoder_block_spec(
        config(multi_latent_attention=True, qk_layernorm=True),
        use_transformer_engine=False,
        normalization="RMSNorm",
        pp_rank=0,
    )
    parts = spec.layer_specs[0].submodules.self_attention.submodules
    assert parts.linear_q_down_proj is parts.linear_kv_down_proj is ColumnParallelLinear
    # Of what is gathered after it, the keys' rotated part gets no gradient from other ranks' heads.
    source = inspect.getsource(MLASelfAttention)
    assert "kv_combined = gather_from_tensor_model_parallel_region(kv_combined)" in source
    assert "k_pos_emb = gather_from_sequence_parallel_region(k_pos_emb, group=self.tp_group)" in source
    assert re.search(r"submodules.linear_q_down_proj in \[\s+Linear,", source)
    assert re.search(r"submodules.linear_kv_down_proj in \[\s+Linear,", source)
    replaced = with_torch_modules(spec).layer_specs[0].submodules.self_attention.submodules
    assert replaced.linear_q_down_proj is replaced.linear_kv_down_proj is DuplicatedLinear
    assert multi_latent_attention.Linear is DuplicatedLinear
    assert multi_latent_attention.TELinear is nn.Linear  # else its own layers could not be made anymore


def test_latent_attention_has_the_eps_of_all_norms() -> None:
    assert inspect.getsource(MLASelfAttention).count("eps=self.config.layernorm_epsilon") == 2
    assert RMSNorm(config(), 4, eps=1e-3).eps == 1e-3


# ---- attention: context parallelism


@on_cpu  # on a GPU Megatron moves the indices there
@pytest.mark.parametrize("cp", [2, 4])
def test_sequences_are_cut_as_megatron_cuts_rotary_embeddings(cp: int) -> None:
    for rank in range(cp):
        group = SimpleNamespace(size=lambda: cp, rank=lambda rank=rank: rank)
        assert torch.equal(get_pos_emb_on_this_cp_rank(torch.arange(16), 0, group), zigzag(16, cp, rank))


# ---- state: groups


def test_every_global_of_megatrons_groups_is_kept() -> None:
    tree = ast.parse(inspect.getsource(parallel_state))
    written = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    known = {name for name in written if hasattr(parallel_state, name)}
    assert len(known) > 40 and not known - current_groups().keys()


def test_globals_are_put_back() -> None:
    before = current_groups()
    group = object()
    set_groups({**before, "_TENSOR_MODEL_PARALLEL_GROUP": group})
    assert parallel_state.get_tensor_model_parallel_group() is group
    set_groups(before)
    assert current_groups() == before and NO_GROUPS["_TENSOR_MODEL_PARALLEL_GROUP"] is None


# ---- model


def test_a_models_outputs_come_from_the_method_that_is_replaced() -> None:
    source = inspect.getsource(GPTModel.forward)
    assert "return self._postprocess(" in source and "hidden_states=hidden_states" in source
    assert names(GPTModel._postprocess)[1] == "hidden_states"
    assert "self.output_layer(" in inspect.getsource(GPTModel._postprocess)  # whole logits
    hidden = torch.ones(3)
    assert HiddenStateModel._postprocess(None, hidden_states=hidden, labels=None) is hidden


def test_a_parallel_layer_can_change_its_class_and_knows_its_group() -> None:
    source = inspect.getsource(ColumnParallelLinear.__init__)
    assert "self.sequence_parallel =" in source and "self.tp_group =" in source
    module = ColumnParallelLinear.__new__(ColumnParallelLinear)
    kind = type("Own", (ColumnParallelLinear,), {})
    set_class(module, kind)
    assert type(module) is kind


def test_transformer_engines_layers_take_gradients_in_place() -> None:
    source = (MEGATRON / "extensions" / "transformer_engine.py").read_text()
    assert "fuse_wgrad_accumulation=self.config.gradient_accumulation_fusion" in source
    assert "gradient_accumulation_fusion" in inspect.getsource(ColumnParallelLinear.__init__)  # why it is not the key
    layer, other = nn.Module(), nn.Module()
    layer.fuse_wgrad_accumulation = False
    add_gradients_in_place([nn.ModuleList([layer, other])])
    assert layer.fuse_wgrad_accumulation is True and not hasattr(other, "fuse_wgrad_accumulation")


def test_chunks_hold_what_is_taken_apart() -> None:
    assert all(callable(kind.forward.cache_clear) for kind in (RotaryEmbedding, YarnRotaryEmbedding))
    assert "self.grad_accs = []" in inspect.getsource(DistributedDataParallel.__init__)
    assert ".main_param = " in inspect.getsource(DistributedOptimizer)
    chunk, accumulators = nn.Linear(2, 2), [object()]
    chunk.grad_accs = accumulators
    chunk.weight.main_param = weight = chunk.weight
    take_apart([chunk])
    assert not accumulators and not vars(chunk) and not hasattr(weight, "main_param")


# ---- state: optimizers


def test_the_distributed_optimizer_takes_ranges_of_parameters() -> None:
    assert names(DistributedOptimizer._get_model_param_range_map) == ["self", "param"]
    assert names(DistributedOptimizer._set_main_param_and_optimizer_states) == ["self", "model_param", "tensors"]
    taken = {}
    part = SimpleNamespace(
        _get_model_param_range_map=lambda parameter: {"param": SimpleNamespace(start=1, end=3)},
        _set_main_param_and_optimizer_states=lambda parameter, own: taken.update(own),
    )
    take_range(part, None, {"exp_avg": torch.arange(6.0).view(2, 3)})
    assert taken["exp_avg"].tolist() == [1, 2] and taken["exp_avg"].untyped_storage().nbytes() == 8


def test_the_hybrid_optimizer_has_inner_ones_that_are_told_and_asked() -> None:
    for sync in ("_sync_sub_optimizers_state_to_hdo", "_sync_hdo_state_to_sub_optimizers"):
        assert names(getattr(HybridDeviceOptimizer, sync)) == ["self"]
    assert isinstance(HybridDeviceOptimizer.sub_optimizers, property)
    told = []
    share_hybrid(SimpleNamespace(_sync_hdo_state_to_sub_optimizers=lambda: told.append(1)))
    assert told == [1]


def test_megatrons_way_to_make_hybrid_moments_moves_the_weights() -> None:
    source = inspect.getsource(HybridDeviceOptimizer.dummy_step)
    assert "randn_like" in source and "self.step()" in source  # else call that


# ---- state: sharded tensors


@pytest.mark.usefixtures("one_rank")
def test_tensors_that_this_rank_writes_go_to_torch_by_their_keys() -> None:
    own = ShardedTensor.from_rank_offsets("own", torch.ones(2))
    replica = ShardedTensor.from_rank_offsets("replica", torch.ones(2), replica_id=1)
    assert list(torch_tensors({"model": {"a": own, "b": replica}})) == ["own"]


# ---- model: routers


def test_megatrons_router_asks_its_replay_for_experts_and_scores() -> None:
    router = inspect.getsource(TopKRouter)
    assert "self.router_replay = None" in router and "router_replay=self.router_replay" in router
    scores = moe_utils.topk_routing_with_score_function
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5], [4.0, 0.0, 1.0, 2.0]], requires_grad=True)
    own, given = [[2, 1], [0, 3]], torch.tensor([[3, 0], [1, 2]])
    asked = []
    replay = _Replay(lambda experts: asked.append(experts.tolist()) or given)
    probs, chosen = scores(logits, 2, use_pre_softmax=False, router_replay=replay)
    assert asked == [own]
    assert chosen.tolist() == [[True, False, False, True], [False, True, True, False]]
    assert torch.allclose(probs.gather(1, given), logits.gather(1, given).softmax(-1))
    probs.square().sum().backward()
    assert (logits.grad != 0).tolist() == chosen.tolist()


def test_a_fused_router_would_not_ask() -> None:
    body = inspect.getsource(moe_utils.topk_routing_with_score_function)
    assert body.index("return fused_topk_with_score_function(") < body.index("router_replay.get_replay_topk")


def test_megatrons_own_replay_is_one_list_for_all_roles() -> None:
    assert RouterReplay.global_router_replay_instances == []  # else use it
    assert names(RouterReplay.get_replay_topk) == names(_Replay.get_replay_topk)
