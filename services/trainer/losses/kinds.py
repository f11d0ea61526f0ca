"""Implements the kinds of policy loss: functions of single tokens, which are averaged in `policy`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from services.common.config.loss import LossConfig, MeanConfig
from services.common.errors import InvalidInput
from services.common.import_path import call_function, require_function

# As in verl: e^20 is about 5e8, which no loss needs to tell from more, while e^89 overflows float32.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Totals:
    """The tokens and sequences of a whole mini-batch, over all ranks and micro-batches."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True)
class Tokens:
    """The N predicted tokens of whole sequences, as a loss reads them."""

    logprobs_N: torch.Tensor
    """The policy's log-probabilities, with gradient."""
    columns: dict[str, torch.Tensor]
    """The columns of updates.packing.Microbatch, and old_logprobs."""
    lengths: tuple[int, ...]
    """The number of tokens of each sequence in N."""

    @classmethod
    def of(cls, logprobs_N: torch.Tensor, columns: dict[str, torch.Tensor], lengths: tuple[int, ...]) -> "Tokens":
        """Builds the tokens. Where loss_mask is 0, every column of log-probabilities gets the policy's own numbers, so
        that no ratio overflows, and `logprobs_N` has no gradient, so that a loss of the user may be NaN there.
        """
        is_trained_N, own_N = columns["loss_mask"] > 0, logprobs_N.detach()
        bounded = {
            name: torch.where(is_trained_N, values_N, own_N) if name.endswith("logprobs") else values_N
            for name, values_N in columns.items()
        }
        return cls(torch.where(is_trained_N, logprobs_N, own_N), bounded, lengths)

    @property
    def log_ratio_N(self) -> torch.Tensor:
        """Returns log(policy / old policy) of each token, clamped to -20..20; a clamped token has no gradient."""
        return (self.logprobs_N - self.columns["old_logprobs"]).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)

    @property
    def advantages_N(self) -> torch.Tensor:
        return self.columns["advantages"]

    def sequence_sum(self, values_N: torch.Tensor) -> torch.Tensor:
        """Returns at every token [N] the sum of its sequence's values where loss_mask is 1, without gradient."""
        # Not index_add: it adds in varying order on GPU, and ranks that share a token must compute the same mask.
        lengths_B = torch.tensor(self.lengths, device=values_N.device)
        trained_N = values_N.detach().where(self.columns["loss_mask"] > 0, 0)
        sums_B = torch.segment_reduce(trained_N, "sum", lengths=lengths_B, unsafe=True)
        return sums_B.repeat_interleave(lengths_B, output_size=values_N.numel())

    def sequence_mean(self, values_N: torch.Tensor) -> torch.Tensor:
        """Returns at every token [N] the mean of its sequence's values where loss_mask is 1, without gradient."""
        return self.sequence_sum(values_N) / self.sequence_sum(torch.ones_like(values_N)).clamp(min=1)


def token_weights(config: MeanConfig, columns: dict[str, torch.Tensor], totals: Totals) -> torch.Tensor:
    """Returns each token's weight [N], with which a sum over the mini-batch is the mean that `aggregation` names."""
    aggregation, mask_N = config.aggregation, columns["loss_mask"]
    if aggregation == "token_mean":
        return mask_N / totals.num_tokens
    per_sequence_N = mask_N / totals.num_sequences
    if aggregation == "seq_mean_token_mean":
        # A sequence without a trained token has length 0, and its weights are 0 whatever they are divided by.
        return per_sequence_N / columns["completion_length"].clamp(min=1)
    return per_sequence_N / (config.norm_tokens or 1)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns PPO's pessimistic surrogate per token (arXiv 1707.06347, eq. 7), negated, and where the clip binds."""
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, clipped), clipped > free


def grpo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss max(-A r, -A clip(r)), r = policy / old, and as metrics where each clip binds.

    If `clip_dual` is c, the loss is at most -A c where A < 0 (arXiv 1912.09729). Without this bound, a single token
    with a negative advantage that has become far more likely could dominate the update.
    """
    ratio_N = tokens.log_ratio_N.exp()
    losses_N, clipped_N = clipped_surrogate(ratio_N, tokens.advantages_N, config.clip_low, config.clip_high)
    if config.clip_dual is None:
        return losses_N, {"clip_fraction": clipped_N}
    bound_N = -tokens.advantages_N * config.clip_dual
    binds_N = (tokens.advantages_N < 0) & (losses_N > bound_N)
    metrics = {"clip_fraction": clipped_N, "clip_dual_fraction": binds_N}
    return torch.where(binds_N, bound_N, losses_N), metrics


def cispo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -sg[clip(r, min_ratio, max_ratio)] A log policy, and as a metric where r is clipped.

    r = policy / old, A is the advantage, and sg stops the gradient.
    """
    ratio_N = tokens.log_ratio_N.detach().exp()
    weights_N = ratio_N.clamp(config.cispo.min_ratio, config.cispo.max_ratio)
    return -weights_N * tokens.advantages_N * tokens.logprobs_N, {"clip_fraction": weights_N != ratio_N}


def gspo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss max(-A s, -A clip(s)), s = exp(mean over the sequence of log(policy / old)).

    This is the paper's token form (GSPO-token), where s is written as sg[s] * policy / sg[policy]. If all tokens of a
    sequence have the same advantage, its gradient is that of the sequence form. To average as the paper does, set
    aggregation: seq_mean_token_mean. The mean is clamped, not each token's log-ratio; a sequence whose mean is clamped
    has no gradient.
    """
    sequence_N = tokens.sequence_mean(tokens.logprobs_N.detach() - tokens.columns["old_logprobs"])
    own_N = tokens.logprobs_N - tokens.logprobs_N.detach()  # is 0, and has the gradient
    ratio_N = (sequence_N + own_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    losses_N, clipped_N = clipped_surrogate(ratio_N, tokens.advantages_N, config.gspo.clip_low, config.gspo.clip_high)
    return losses_N, {"clip_fraction": clipped_N}


def gmpo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -A g, g = exp(mean over the sequence of c), and as a metric where c is clipped.

    c = log(policy / old) of a token, bounded to clip_high at most where A > 0 and to -clip_low at least where A < 0
    (Geometric-Mean Policy Optimization, arXiv 2507.20673). A clipped token has no gradient, but its bound counts in the
    mean. As in `gspo`, g is written as sg[g] * exp(c - sg[c]), whose gradient is that of the paper's sequence form if
    all tokens of a sequence have the same advantage and aggregation is seq_mean_token_mean. The mean is clamped to
    -20..20, not each token's log-ratio; a sequence whose mean is clamped has no gradient.
    """
    log_ratio_N = tokens.logprobs_N - tokens.columns["old_logprobs"]
    bounded_N = log_ratio_N.clamp(-config.gmpo.clip_low, config.gmpo.clip_high)
    clipped_N = tokens.advantages_N * (log_ratio_N - bounded_N) > 0
    kept_N = torch.where(clipped_N, bounded_N, log_ratio_N)
    own_N = kept_N - kept_N.detach()  # is 0, and has the gradient
    ratio_N = (tokens.sequence_mean(kept_N) + own_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    return -tokens.advantages_N * ratio_N, {"clip_fraction": clipped_N}


def sapo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -A (4 / tau) sigmoid(tau (r - 1)), r = policy / old; tau depends on the sign of A.

    With g = sigmoid(tau (r - 1)), the gradient is that of -A r times the gate 4 g (1 - g), which is 1 at r = 1 and
    smaller on either side. The metric sapo_gate is this gate. To average as the paper does, set
    aggregation: seq_mean_token_mean.
    """
    is_positive_N = tokens.advantages_N > 0
    tau_N = torch.full_like(tokens.advantages_N, config.sapo.tau_negative)
    tau_N = tau_N.masked_fill(is_positive_N, config.sapo.tau_positive)
    gate_N = torch.sigmoid(tau_N * (tokens.log_ratio_N.exp() - 1))
    return -tokens.advantages_N * 4 / tau_N * gate_N, {"sapo_gate": 4 * gate_N * (1 - gate_N)}


def dppo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -A min(r, max_ratio), r = policy / old, and as a metric where it is masked to 0.

    The gradient is that of REINFORCE weighted by min(r, max_ratio).

    A token is masked, and counted as clipped, if the policy has already moved in the direction of its advantage
    (A > 0 and r > 1, or A < 0 and r < 1) and the divergence between the old and the current policy is above the
    threshold. The divergence is between distributions of two events: the sampled token, of probability p, and all
    other tokens. tv is |p_old - p|; kl is p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)). Under this
    rule a rare token may multiply its probability, but a frequent one may not halve it.

    In the paper the old policy is the engine's, so set old_logprobs: engine.
    """
    policy_N, old_N = tokens.logprobs_N.detach(), tokens.columns["old_logprobs"]
    divergence_N = _DIVERGENCES[config.dppo.divergence](old_N, policy_N)
    is_onward_N = tokens.advantages_N * (policy_N - old_N) > 0
    masked_N = is_onward_N & (divergence_N > config.dppo.threshold)
    weights_N = (policy_N - old_N).exp().clamp(max=config.dppo.max_ratio)
    # The last factor is 1 and has the gradient.
    losses_N = -tokens.advantages_N * weights_N * (tokens.logprobs_N - policy_N).exp()
    return torch.where(masked_N, 0, losses_N), {"clip_fraction": masked_N}


def _total_variation(old_N: torch.Tensor, policy_N: torch.Tensor) -> torch.Tensor:
    return (old_N.exp() - policy_N.exp()).abs()


def _kl(old_N: torch.Tensor, policy_N: torch.Tensor) -> torch.Tensor:
    old_rest_N, policy_rest_N = _log_rest(old_N), _log_rest(policy_N)
    return old_N.exp() * (old_N - policy_N) + old_rest_N.exp() * (old_rest_N - policy_rest_N)


def _log_rest(logprobs_N: torch.Tensor) -> torch.Tensor:
    """Returns log(1 - p), which stays finite even if p rounds to 1."""
    # Not log(1 - exp(x)), which loses its digits where p is close to 1.
    return torch.log(-torch.expm1(logprobs_N.clamp(max=-torch.finfo(logprobs_N.dtype).eps)))


_DIVERGENCES = {"tv": _total_variation, "kl": _kl}


def covariance_sums(columns: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Returns the sums, float64 [2], of behavior_logprobs and advantages over this rank's tokens."""
    names = ("behavior_logprobs", "advantages")
    sums = [torch.stack([(c["loss_mask"] * c[name]).sum(dtype=torch.float64) for name in names]) for c in columns]
    return torch.stack(sums).sum(0)


def covariance(columns: dict[str, torch.Tensor], means_2: torch.Tensor) -> torch.Tensor:
    """Returns each token's term of the covariance, [N], given the mini-batch's means of logprobs and advantages."""
    logprob, advantage = means_2.to(columns["advantages"].dtype)
    # The engine's log-probabilities, because the means are needed before the first forward pass of the mini-batch.
    return (columns["behavior_logprobs"] - logprob) * (columns["advantages"] - advantage)


def clip_cov(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the clipped surrogate of each token, and 0 for tokens of high covariance."""
    losses_N, metrics = grpo(tokens, config)
    selected_N = tokens.columns["covariance"] >= config.clip_cov.min_covariance
    return torch.where(selected_N, 0, losses_N), {**metrics, "covariance_fraction": selected_N}


def kl_cov(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns -A r of each token, without a clip, plus coef * |log r| for the selected tokens; r = policy / old.

    In the first update r is 1 and the penalty has no gradient, so this kind needs num_minibatches or num_epochs above
    1.
    """
    log_ratio_N = tokens.log_ratio_N
    selected_N = tokens.columns["covariance"] >= config.kl_cov.min_covariance
    penalty_N = torch.where(selected_N, config.kl_cov.coef * log_ratio_N.abs(), 0)
    return -tokens.advantages_N * log_ratio_N.exp() + penalty_N, {"covariance_fraction": selected_N}


def reinforce(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -A log policy."""
    return -tokens.advantages_N * tokens.logprobs_N, {}


def sft(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -log policy. Does not read advantages."""
    return -tokens.logprobs_N, {}


_FIELD = "trainer.loss.import_path"


def python(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Calls the user's function, which returns the loss [N] of each token and metrics [N] as every kind does.

    Raises:
        InvalidInput: The function cannot be imported, raises, returns a loss without gradient, or one of its results
            does not have shape [N].
    """
    result = call_function(config.import_path, (tokens, config), config.kwargs, field=_FIELD)
    if not _is_pair(result):
        raise InvalidInput(f"{_FIELD}: {config.import_path} must return the loss and a dict of metrics", field=_FIELD)
    losses_N, metrics = result
    is_alone = not (config.kl_coef or config.entropy_coef or config.distill.coef)  # else it may be 0 on purpose
    if is_alone and torch.is_tensor(losses_N) and tokens.logprobs_N.requires_grad and not losses_N.requires_grad:
        why = "returned a loss without gradient: compute it from tokens.logprobs_N or tokens.log_ratio_N"
        raise InvalidInput(f"{_FIELD}: {config.import_path} {why}", field=_FIELD)
    for name, values_N in {"loss": losses_N, **metrics}.items():
        shape = list(values_N.shape) if torch.is_tensor(values_N) else None
        if shape != list(tokens.logprobs_N.shape):
            what = f"{name} of shape {shape}" if shape is not None else f"{name} as {type(values_N).__name__}"
            raise InvalidInput(
                f"{_FIELD}: {config.import_path} returned {what}; "
                f"it must be a tensor with one value for each of the {len(tokens.logprobs_N)} tokens",
                field=_FIELD,
            )
    return losses_N, metrics


def _is_pair(result: object) -> bool:
    parts = cast(tuple[object, ...], result) if isinstance(result, tuple) else ()
    return len(parts) == 2 and isinstance(parts[1], dict)


def require_importable(config: LossConfig) -> None:
    """Imports the user's function, if the config names one, so that a mistake is found before the run starts.

    Raises:
        InvalidInput: The function cannot be imported, or does not take its arguments.
    """
    if config.import_path:
        require_function(config.import_path, ("tokens", "config"), config.kwargs, field=_FIELD)
