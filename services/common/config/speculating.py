"""Refuses what speculative decoding was not checked with."""

from services.common.config.evaluation.section import EvaluationConfig
from services.common.config.placement import Placement
from services.common.config.speculation import SpeculationConfig
from services.common.config.trainer.section import TrainerConfig


def check_speculation(
    speculation: SpeculationConfig, placement: Placement, trainer: TrainerConfig, evaluation: EvaluationConfig
) -> None:
    """Raises ValueError if another section asks for something that speculative decoding cannot do."""
    if trainer.moe.replay_routes == "on":
        raise ValueError(
            "trainer.moe.replay_routes on: the routes of drafted tokens were not compared with the trainer's; leave "
            "rollout.speculation out, or set trainer.moe.replay_routes to auto"
        )
    if trainer.lora.published_rank:
        raise ValueError(
            "trainer.lora.publish adapter: drafted tokens were not verified with adapters in the engine; leave "
            "rollout.speculation out, or set trainer.lora.publish to merged"
        )
    if speculation.kind == "eagle3" and placement == "colocated":
        raise ValueError(
            "rollout.speculation.kind eagle3: an engine that sleeps drops the weights of the head, which nobody "
            "publishes again; set kind ngram, or placement disaggregated"
        )
    if cut := [name for name, settings in evaluation.sets.items() if settings.min_p]:
        raise ValueError(
            f"evaluation.sets.{cut[0]}.min_p: vLLM has no min_p with speculative decoding; set top_p instead, or leave "
            "rollout.speculation out"
        )
