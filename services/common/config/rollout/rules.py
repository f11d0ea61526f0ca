"""Rejects settings with which speculative decoding was not tested."""

from services.common.config.evaluation.section import EvaluationConfig
from services.common.config.placement import Placement
from services.common.config.rollout.speculation import SpeculationConfig
from services.common.config.trainer.section import TrainerConfig


def check_speculation(
    speculation: SpeculationConfig, placement: Placement, trainer: TrainerConfig, evaluation: EvaluationConfig
) -> None:
    """Raises ValueError if another section has a setting that speculative decoding does not support."""
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
            "publishes again; set kind ngram or suffix, or placement disaggregated"
        )
    for name, settings in evaluation.sets.items():
        reasons = {key: f"vLLM has no {key} with speculative decoding" for key in ("min_p", "min_tokens")}
        reasons["bad_words"] = "it was not checked that no drafted token completes one"
        for key, why in reasons.items():
            if getattr(settings, key):
                instead = "set top_p instead" if key == "min_p" else "leave it out"
                raise ValueError(f"evaluation.sets.{name}.{key}: {why}; {instead}, or leave rollout.speculation out")


def check_length(speculation: SpeculationConfig, longest: tuple[int, str], max_model_len: int) -> None:
    """Raises ValueError if a sample may come so close to the engine's limit that vLLM stops drafting for all samples.

    `longest` has the maximum number of tokens of a sample with its prompt, and the config keys that add up to it. vLLM
    0.32 adds the tokens that are being verified and those that it would draft next. If that exceeds the limit for one
    sample, it drafts token 0 for each sample of the step, which costs time and gains nothing.
    """
    tokens, parts = longest
    if (least := tokens + 2 * speculation.num_tokens) > max_model_len:
        raise ValueError(
            f"{parts} = {tokens} leaves no room for twice rollout.speculation.num_tokens {speculation.num_tokens} "
            f"below rollout.max_model_len = {max_model_len}; raise that to at least {least}"
        )
