"""Defines the config of routing replay: training with the experts that the engine chose."""

from typing import Literal

from pydantic import field_validator

from services.common.config.base import Strict
from services.common.config.trainer.loss import LossConfig
from services.common.config.trainer.megatron import MegatronConfig


class RoutingConfig(Strict):
    """Configures how a policy with mixture-of-experts layers is trained; has no effect on a dense model."""

    replay_routes: Literal["auto", "on", "off"] = "auto"
    """Routing replay (R3, arXiv 2510.11370): compute each token with the experts that the engine chose for it, in the
    forward pass, in recomputation and so in the backward pass. Their weights still come from the trainer's router,
    which gets gradients. auto: replay if all layers of the model have experts, the engine can return its choices, and
    the config allows it (no stop strings, and with Megatron no moe_router_fusion, sinkhorn or CUDA graphs); on: fail
    if it is not possible; off: use the experts that the trainer's router chooses."""

    @field_validator("replay_routes", mode="before")
    @classmethod
    def _on_and_off_are_words(cls, value: object) -> object:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # YAML reads them as booleans


def ignores_routes(megatron: MegatronConfig) -> str:
    """Returns the setting with which Megatron would ignore routes; an empty string if there is none."""
    given = megatron.transformer_config_kwargs
    if given.get("moe_router_fusion"):
        return "megatron.transformer_config_kwargs.moe_router_fusion"
    if given.get("cuda_graph_impl", "none") != "none":
        return "megatron.transformer_config_kwargs.cuda_graph_impl"
    if "sinkhorn" in (megatron.moe.load_balancing_type, given.get("moe_router_load_balancing_type")):
        return "megatron.moe.load_balancing_type sinkhorn"
    return ""


def check_routing(routing: RoutingConfig, loss: LossConfig, strategy: str, megatron: MegatronConfig) -> None:
    """Raises ValueError if routes must be replayed and this config makes it impossible."""
    if routing.replay_routes != "on":
        return
    if not loss.is_sampled:
        raise ValueError(f"moe.replay_routes on needs sampled tokens, and loss.kind {loss.kind} has none: leave it out")
    if strategy == "megatron" and (setting := ignores_routes(megatron)):
        raise ValueError(
            f"moe.replay_routes on: with {setting} Megatron's router ignores routes; leave that out, or set "
            "moe.replay_routes to off"
        )
