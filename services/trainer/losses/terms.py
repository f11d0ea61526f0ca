"""Defines the inputs of the token losses, and the terms that several of them share."""

from dataclasses import dataclass

import torch

from services.common.config.loss import MeanConfig

# As in verl: e^20 is about 5e8, which no loss needs to tell from more, while e^89 overflows float32.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Totals:
    """Counts the tokens and sequences of a whole mini-batch, over all ranks and micro-batches."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True)
class Tokens:
    """Holds the N predicted tokens of whole sequences, as a loss reads them."""

    logprobs_N: torch.Tensor
    """The policy's log-probabilities, with gradient."""
    columns: dict[str, torch.Tensor]
    """The columns of updates.packing.Pack, and old_logprobs."""
    lengths: tuple[int, ...]
    """The number of tokens of each sequence in N."""

    @classmethod
    def of(cls, logprobs_N: torch.Tensor, columns: dict[str, torch.Tensor], lengths: tuple[int, ...]) -> "Tokens":
        """Builds the tokens. Masked tokens get the policy's log-probabilities everywhere, so no ratio overflows."""
        is_trained_N, own_N = columns["loss_mask"] > 0, logprobs_N.detach()
        given = {
            name: torch.where(is_trained_N, values_N, own_N) if name.endswith("logprobs") else values_N
            for name, values_N in columns.items()
        }
        return cls(logprobs_N, given, lengths)

    @property
    def log_ratio_N(self) -> torch.Tensor:
        """Returns log(policy / old policy) of each token, clamped to -20..20; a clamped token has no gradient."""
        return (self.logprobs_N - self.columns["old_logprobs"]).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)

    @property
    def advantages_N(self) -> torch.Tensor:
        """Returns each token's advantage."""
        return self.columns["advantages"]

    def sequence_sum(self, values_N: torch.Tensor) -> torch.Tensor:
        """Returns at every token [N] the sum of its sequence's values where loss_mask is 1, without gradient."""
        # Not index_add: it adds in varying order on GPU, and ranks that share a token must compute the same mask.
        lengths_B = torch.tensor(self.lengths, device=values_N.device)
        trained_N = values_N.detach() * self.columns["loss_mask"].to(values_N.dtype)
        sums_B = torch.segment_reduce(trained_N, "sum", lengths=lengths_B, unsafe=True)
        return sums_B.repeat_interleave(lengths_B, output_size=values_N.numel())

    def sequence_mean(self, values_N: torch.Tensor) -> torch.Tensor:
        """Returns at every token [N] the mean of its sequence's values where loss_mask is 1, without gradient."""
        return self.sequence_sum(values_N) / self.columns["completion_length"].clamp(min=1)


def token_weights(config: MeanConfig, columns: dict[str, torch.Tensor], totals: Totals) -> torch.Tensor:
    """Returns each token's weight [N], with which a sum over the mini-batch is the mean that `aggregation` names."""
    aggregation, mask_N = config.aggregation, columns["loss_mask"]
    if aggregation == "token_mean":
        return mask_N / totals.num_tokens
    per_sequence_N = mask_N / totals.num_sequences
    if aggregation == "seq_mean_token_mean":
        return per_sequence_N / columns["completion_length"].clamp(min=1)
    return per_sequence_N / (config.norm_tokens or 1)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns PPO's pessimistic surrogate per token (arXiv 1707.06347, eq. 7), negated, and where the clip binds."""
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, clipped), clipped > free
