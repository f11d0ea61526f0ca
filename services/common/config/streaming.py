"""Decides how a batch is cut into blocks, and whether they are sent while other groups are still being generated."""

from services.common.config.run import Config
from services.common.config.trainer.section import TrainerConfig
from services.common.megatron.layout import data_parallel_size, samples_at_once

# More blocks leave less to compute after the last group. Each costs a reduction of the gradients, and passes of the
# model that may not be full: the samples are shorter than the longest possible.
_MAX_BLOCKS = 8
# Micro-batches of a block for each stage of a pipeline, which fills and drains for every block. So it idles for less
# than a fifth of the time: (p - 1) of (4p + p - 1) micro-batches, with p stages.
_PACKS_PER_STAGE = 4
# The kinds of advantage that depend on no other group of the batch.
_GROUP_KINDS = {"grpo", "dr_grpo", "rloo", "opo", "per_turn", "remax"}


def groups_per_block(config: Config) -> int:
    """Returns the number of prompt groups in a block; 0 if the batch is trained on as a whole.

    There are as many blocks, at most eight, as can each fill one micro-batch of every rank (with a pipeline, four for
    each stage) if all samples have the maximum length. Blocks depend on the config only and not on `trainer.streaming`,
    so that streaming changes no result. With several mini-batches, each consists of one or more whole blocks of equal
    size.
    """
    if not _is_exact(config):
        return 0
    trainer = config.trainer
    wanted = config.data.prompts_per_step // trainer.num_minibatches
    longest = config.data.max_prompt_tokens + config.max_response_tokens
    most_tokens = wanted * config.rollout.completions_per_prompt * longest
    num_packs = data_parallel_size(trainer) * _packs_per_rank(trainer)
    num_blocks = min(wanted, _MAX_BLOCKS, most_tokens // (trainer.max_tokens_per_microbatch * num_packs))
    size = -(-wanted // max(1, num_blocks))
    if trainer.num_minibatches > 1:
        return next(whole for whole in range(size, wanted + 1) if wanted % whole == 0)
    return size if num_blocks > 1 else 0


def orders_by_length(config: Config) -> bool:
    """Returns whether the groups of a batch are in the order of their longest completion, not in that of their prompts.

    Groups finish in about that order, so that the first blocks are complete early. This needs a step that trains on all
    its groups and begins them all at once, with one request per sample.
    """
    num_samples = config.data.prompts_per_step * config.rollout.completions_per_prompt
    return (
        groups_per_block(config) > 0
        and config.trainer.num_minibatches == 1  # a prompt's mini-batch must not depend on its samples
        and not config.environment
        and not config.advantage.needs_baseline
        and not config.selection.dynamic.enabled
        and config.selection.over_sampling.factor == 1
        and num_samples <= config.rollout.num_replicas * config.rollout.max_samples
    )


def streams(config: Config) -> bool:
    """Returns whether blocks are sent as soon as they are complete.

    With a lag, the batch is complete before its update; on shared GPUs, the trainer has no memory until it is.
    """
    if config.trainer.lag.versions or config.placement == "colocated":
        return False
    return config.trainer.streaming == "auto" and groups_per_block(config) > 0


def _packs_per_rank(trainer: TrainerConfig) -> int:
    """Returns the number of micro-batches that a block should have on each rank."""
    num_stages = trainer.megatron.pipeline_model_parallel_size if trainer.strategy == "megatron" else 1
    return num_stages * _PACKS_PER_STAGE if num_stages > 1 else 1


def _is_exact(config: Config) -> bool:
    """Returns whether the sum of the blocks' gradients, divided by a mini-batch's counts, is its gradient."""
    trainer, advantage = config.trainer, config.advantage
    return (
        trainer.adds_blocks
        and config.critic is None
        and advantage.kind in _GROUP_KINDS
        and advantage.whitening != "batch"
        and config.selection.over_sampling.keep == "index"
        # The last block may be a single group, which must have a sample for every rank.
        and config.rollout.completions_per_prompt >= samples_at_once(trainer)
    )
