"""Compares the engine's log-probabilities with the trainer's, before an update is applied."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from services.common.config.trainer import TrainerConfig
from services.common.errors import InternalError, PreconditionFailed, Reason
from services.trainer.backend import Backend, ReplaysRoutes
from services.trainer.updates.packing import Pack


class Gaps:
    """Adds up one rank's differences between behavior and trainer log-probabilities over its trained tokens."""

    def __init__(self) -> None:
        self.sums_4: torch.Tensor | None = None
        """Sums of |behavior - trainer|, of the k3 estimate of their KL divergence, of w and of w^2, float64; w is the
        importance weight exp(trainer - behavior)."""
        self.largest: torch.Tensor | None = None
        """Maximum of |behavior - trainer|; 0 if all tokens are masked."""

    def add(self, packs: Sequence[Pack], outputs: Sequence[torch.Tensor]) -> None:
        """Adds `packs`, given the `outputs` of the policy before the update."""
        is_trained_N = torch.cat([pack.columns["loss_mask"] for pack in packs]) > 0
        behavior_N = torch.cat([pack.columns["behavior_logprobs"] for pack in packs])[is_trained_N].double()
        trainer_N = torch.cat([outputs_2N[0] for outputs_2N in outputs])[is_trained_N].double()
        log_weight_N = trainer_N - behavior_N
        weight_N, gap_N = log_weight_N.exp(), log_weight_N.abs()
        kl_N = torch.expm1(log_weight_N) - log_weight_N  # unlike the loss's k3 without a bound: it measures
        sums_4 = torch.stack([x.sum() for x in (gap_N, kl_N, weight_N, weight_N.square())])
        largest = torch.cat([gap_N, gap_N.new_zeros(1)]).max()
        self.sums_4 = sums_4 if self.sums_4 is None else self.sums_4 + sums_4
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)


def require_agreement(backend: Backend, gaps: Gaps, num_tokens: int, config: TrainerConfig) -> dict[str, float]:
    """Returns the gap between engine and trainer on the `num_tokens` trained tokens of all ranks.

    These are the mean and the maximum of |behavior - trainer|, the k3 estimate of their KL divergence, and the
    effective sample size of the importance weights w as a share of n tokens, (sum w)^2 / (n sum w^2), which is 1 if
    they agree exactly.

    Raises:
        PreconditionFailed: The mean gap is above the config's limit or, with a lag, the effective sample size is below
            its limit. The gradients are discarded.
    """
    assert gaps.sums_4 is not None and gaps.largest is not None, "there is at least one pack"
    gap, kl, weight, weight_square = backend.reduce(gaps.sums_4, dist.ReduceOp.SUM) / num_tokens
    found = {
        "logprob_gap_mean": float(gap),
        "logprob_gap_max": float(backend.reduce(gaps.largest, dist.ReduceOp.MAX)),
        "logprob_gap_kl": float(kl),
        "logprob_gap_ess": float(weight.square() / weight_square),
    }
    if not found["logprob_gap_mean"] <= config.max_logprob_gap:  # "not <=" so that NaN is rejected too
        backend.discard_gradients()
        raise PreconditionFailed(
            f"the engine and the trainer disagree: their log-probabilities differ by {found['logprob_gap_mean']:.4g} "
            f"on average, more than trainer.max_logprob_gap {config.max_logprob_gap:g}; nothing was applied",
            reason=Reason.LOGPROB_GAP,
            **found,
        )
    if config.lag.versions and not found["logprob_gap_ess"] >= config.lag.min_ess:
        backend.discard_gradients()
        raise PreconditionFailed(
            f"the effective sample size of the importance weights is {found['logprob_gap_ess']:.4g} of the tokens, "
            f"less than trainer.lag.min_ess {config.lag.min_ess:g}: the policy has moved too far from the "
            "weights that were sampled; nothing was applied",
            reason=Reason.LOW_ESS,
            **found,
        )
    return found


class Replayed:
    """Adds up what an update has replayed."""

    def __init__(self) -> None:
        self._num_tokens = self._num_experts = self._num_agreeing = 0.0

    def add(self, backend: Backend, packs: Sequence[Pack]) -> None:
        """Compares `packs`, which `backend` has just accumulated, with what it has replayed.

        Raises:
            InternalError: Some token of some layer was computed with other experts. The gradients are discarded.
        """
        routes = [pack.routes_TLK for pack in packs if pack.routes_TLK is not None]
        if not routes:
            return
        num_tokens = torch.tensor(float(sum(map(len, routes))), dtype=torch.float64, device=backend.device)
        num_tokens = float(backend.reduce(num_tokens, dist.ReduceOp.SUM))
        num_layers, top_k = routes[0].shape[1:]
        counts = backend.replayed().tolist() if isinstance(backend, ReplaysRoutes) else [0.0, 0.0]
        if counts[0] != num_tokens * num_layers:
            backend.discard_gradients()
            raise InternalError(
                f"{counts[0]:g} routes of {num_tokens:g} tokens x {num_layers} layers were replayed, so some were "
                "ignored; nothing was applied. Set trainer.moe.replay_routes to off to train without them"
            )
        self._num_tokens += num_tokens
        self._num_experts += counts[0] * top_k
        self._num_agreeing += counts[1]

    def metrics(self) -> dict[str, float]:
        """Returns the number of replayed tokens, prompts included, and the share of their experts that the trainer's
        router would have chosen too; nothing if the batch has no routes."""
        if not self._num_tokens:
            return {}
        return {
            "moe_replayed_tokens": self._num_tokens,
            "moe_route_agreement": self._num_agreeing / self._num_experts,
        }
