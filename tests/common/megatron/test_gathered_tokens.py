"""Tests when the ranks of experts gather all tokens, and which auxiliary losses the router may have."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.common.config.layout import check_layout, gathers_tokens
from services.common.config.megatron import MegatronConfig
from services.common.errors import InvalidInput
from tests.common.megatron.test_layout import EP, ETP, MOE, TP

GATHERED = {"token_dispatcher_type": "allgather"}
AUX = {"load_balancing_type": "aux_loss", "aux_loss_coeff": 0.1}


def test_ranks_that_gather_tokens_are_a_legal_layout() -> None:
    check_layout(MegatronConfig.model_validate({EP: 2, "moe": GATHERED}), 2, architecture=MOE)


@pytest.mark.parametrize(
    ("megatron", "num_ranks", "why"),
    [
        ({"moe": GATHERED | {"grouped_gemm": False}}, 2, "needs moe.grouped_gemm"),
        ({TP: 2, "moe": GATHERED}, 4, "expert_tensor_parallel_size is 2"),
        ({"moe": GATHERED | AUX}, 2, "would count the padding"),
        ({"moe": GATHERED, "transformer_config_kwargs": {"moe_z_loss_coeff": 0.1}}, 2, "would count the padding"),
        ({"moe": GATHERED, "transformer_config_kwargs": {"moe_expert_capacity_factor": 1.0}}, 2, "capacity_factor"),
    ],
)
def test_what_does_not_work_with_it_is_refused(megatron: dict[str, Any], num_ranks: int, why: str) -> None:
    config = MegatronConfig.model_validate({EP: 2} | megatron)
    with pytest.raises(InvalidInput, match=f"token_dispatcher_type.*allgather.*{why}.*nearest legal: alltoall"):
        check_layout(config, num_ranks, architecture=MOE)
    chosen = MegatronConfig.model_validate(
        {EP: 2} | megatron | {"moe": megatron["moe"] | {"token_dispatcher_type": "auto"}}
    )
    assert not gathers_tokens(chosen, 8)


@pytest.mark.parametrize(
    ("megatron", "num_experts_per_tok", "gathers"),
    [
        ({EP: 2}, 8, True),
        ({EP: 4}, 8, True),
        ({EP: 8}, 8, False),  # sends as much as all-to-all
        ({EP: 2}, 2, False),
        ({}, 8, False),
        ({TP: 2, EP: 2}, 8, False),
        ({TP: 2, EP: 2, ETP: 1}, 8, True),
        ({EP: 2, "moe": {"grouped_gemm": False}}, 8, False),
        ({EP: 2, "moe": {"token_dispatcher_type": "alltoall"}}, 8, False),
        ({EP: 2, "moe": GATHERED}, 2, True),
        ({"moe": GATHERED}, 2, False),
    ],
)
def test_tokens_are_gathered_where_that_sends_less(
    megatron: dict[str, Any], num_experts_per_tok: int, gathers: bool
) -> None:
    assert gathers_tokens(MegatronConfig.model_validate(megatron), num_experts_per_tok) == gathers


def test_megatrons_auxiliary_loss_of_each_sequence_is_that_of_a_pack_or_divided_twice() -> None:
    MegatronConfig.model_validate({"moe": AUX})
    with pytest.raises(ValidationError, match="'aux_loss', 'global_aux_loss'"):
        MegatronConfig.model_validate({"moe": AUX | {"load_balancing_type": "seq_aux_loss"}})
