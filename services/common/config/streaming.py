"""Decides how a batch is cut into blocks, and whether they are sent while other groups are still being generated."""

from services.common.batches import BlockCutter
from services.common.config.layout import data_parallel_size, layout_of, samples_at_once
from services.common.config.run import Config
from services.common.config.trainer import TrainerConfig

# The assumed ratio of the longest possible sample to the mean: blocks must follow from the config, not from samples.
_LONGEST_TO_MEAN = 4
# The most blocks of a batch of such samples; longer ones make more. More blocks leave less to compute after the last
# group, but each costs a reduction of the gradients, and a pass of the model that may not be full.
_MAX_BLOCKS = 8
# Micro-batches of a block for each stage of a pipeline, which fills and drains for every block. So it idles for less
# than a fifth of the time: (p - 1) of (4p + p - 1) micro-batches, with p stages.
_MICROBATCHES_PER_STAGE = 4
# The kinds of advantage that depend on no other group of the batch.
STREAMED_KINDS = {"grpo", "dr_grpo", "max_rl", "rloo", "opo", "per_turn", "remax", "distill"}


def tokens_per_block(config: Config) -> int:
    """Returns the number of tokens with which a block ends; 0 if the batch is trained on as a whole.

    A block fills a micro-batch of every rank (with a pipeline, four for each stage), or a multiple of that where there
    would otherwise be more than eight blocks. It ends with the group that exceeds this number, which is therefore lower
    by the tokens of an average group. The first blocks are smaller (`block_growth`). The number depends on the config
    only and not on `trainer.streaming`, so that streaming changes no result.
    """
    if not _is_exact(config):
        return 0
    trainer, most_tokens, fewest = config.trainer, most_tokens_per_minibatch(config), _fewest_tokens(config)
    full = fewest * max(1, most_tokens // (fewest * _MAX_BLOCKS * _LONGEST_TO_MEAN))
    if trainer.num_minibatches == 1 and most_tokens < 2 * full:
        return 0
    of_group = most_tokens // groups_per_minibatch(config) // _LONGEST_TO_MEAN
    return full - min(of_group, _tokens_per_pass(trainer) // 2)


def block_growth(config: Config) -> int:
    """Returns the number of tokens by which each block is larger than the one before, until they are full.

    So the first block is the smallest that fills a pass of the model, and the trainer starts early. Still smaller ones
    would make more passes, each of which costs time of its own. 0 if a block is one pass at most.
    """
    fewest = _fewest_tokens(config)
    return fewest if tokens_per_block(config) > fewest else 0


def most_tokens_per_minibatch(config: Config) -> int:
    """Returns the number of tokens of a mini-batch whose samples are as long as they may be."""
    num_samples = groups_per_minibatch(config) * config.rollout.completions_per_prompt
    return num_samples * (config.data.max_prompt_tokens + config.max_response_tokens)


def groups_per_minibatch(config: Config) -> int:
    """Returns the number of prompt groups in a mini-batch of a step that has found all groups."""
    return config.data.prompts_per_step // config.trainer.num_minibatches


def block_cutter(config: Config) -> BlockCutter | None:
    """Returns what cuts one batch into blocks; None if it is trained on as a whole."""
    size = tokens_per_block(config)
    return BlockCutter(size, groups_per_minibatch(config), block_growth(config)) if size else None


def orders_by_length(config: Config) -> bool:
    """Returns whether the groups of a batch are in the order of their longest completion, not in that of their prompts.

    Groups finish in about that order, so that the first blocks are complete early. This needs a step that trains on all
    its groups and begins them all at once, with one request per sample.
    """
    num_samples = config.data.prompts_per_step * config.rollout.completions_per_prompt
    return (
        tokens_per_block(config) > 0
        and config.trainer.num_minibatches == 1  # a prompt's mini-batch must not depend on its samples
        and not config.environment
        and not config.advantage.needs_baseline
        and not config.selection.dynamic.enabled
        and config.selection.over_sampling.factor == 1
        and num_samples <= config.rollout.num_replicas * config.rollout.max_samples
    )


def streams(config: Config) -> bool:
    """Returns whether blocks are sent as soon as they are complete.

    With a lag, the batch is complete before its update; where engines sleep, the trainer has no memory until it is.
    """
    if config.trainer.lag.versions or config.takes_turns:
        return False
    return config.trainer.streaming == "auto" and tokens_per_block(config) > 0


def _tokens_per_pass(trainer: TrainerConfig) -> int:
    """Returns the number of tokens of a micro-batch of every rank."""
    return trainer.max_tokens_per_microbatch * data_parallel_size(trainer)


def _fewest_tokens(config: Config) -> int:
    """Returns the number of tokens that fill the fewest micro-batches that a block should have."""
    num_stages = layout_of(config.trainer).pp
    return _tokens_per_pass(config.trainer) * (num_stages * _MICROBATCHES_PER_STAGE if num_stages > 1 else 1)


def _is_exact(config: Config) -> bool:
    """Returns whether the sum of the blocks' gradients, divided by a mini-batch's counts, is its gradient."""
    trainer, advantage = config.trainer, config.advantage
    return (
        trainer.adds_blocks
        and config.critic is None
        and advantage.kind in STREAMED_KINDS
        and advantage.whitening != "batch"
        and config.selection.over_sampling.keep == "index"
        # A block may be a single group, which must have a sample for every rank.
        and config.rollout.completions_per_prompt >= samples_at_once(trainer)
    )
