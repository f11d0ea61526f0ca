"""Updates the policy or the critic on one batch, with any backend and any loss. Every rank runs the same code.

The engine's log-probabilities are compared with the trainer's before the first update: on the whole batch if old
log-probabilities are recomputed, else on the first mini-batch, because the trainer's log-probabilities of later ones
come from a policy that has already been updated.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from services.common.config.trainer import CriticSettings, TrainerConfig
from services.common.errors import InternalError, LockstepError, PreconditionFailed, Reason
from services.trainer.backend import Backend, LossFunction
from services.trainer.losses.kinds import Totals, covariance, covariance_sums
from services.trainer.losses.policy import distill_loss, explained_variance, policy_loss, value_loss
from services.trainer.updates.optim import learning_rate, weight_decay
from services.trainer.updates.packing import Microbatch

# Metrics that are divided by the same count as the loss; the others are means over tokens.
_LOSSES = ("loss", "policy_loss")
# The counts that the losses of a block are divided by, as long as those of its mini-batch are not known.
_UNKNOWN = Totals(1, 1)


class BatchUpdate:
    """Updates the policy on one batch: `num_epochs` times, each time once for each mini-batch.

    Blocks of the first mini-batch add to the gradient as they arrive. Those of later ones are kept, because they are
    trained on by the weights that the updates before them leave. The counts that the loss is divided by are known only
    at the end. So each block adds the gradient of the sum of its losses, and `apply` divides once, in float32.

    A batch of one block is kept as a whole, and `apply` computes each mini-batch with its counts. So it may also have
    losses that are divided by other counts, means over the batch, dropout and several epochs.

    Discards gradients that an earlier update has left.
    """

    def __init__(self, backend: Backend, config: TrainerConfig, temperature: float, *, is_one_block: bool):
        self._backend, self._config, self._temperature = backend, config, temperature
        self._is_one_block, self._is_compared = is_one_block, config.loss.is_sampled
        self._kept: dict[int, list[Microbatch]] = {}  # number of a mini-batch -> this rank's micro-batches
        self._sums: dict[str, float] = {}
        self._diffs, self._replayed = LogprobDiffs(backend.device), Replayed()
        backend.discard_gradients()

    def add(self, microbatches: Sequence[Microbatch], minibatch: int) -> None:
        """Takes this rank's micro-batches of a block that belong to mini-batch number `minibatch`, counted from 0."""
        if not (minibatch or self._is_one_block):
            self._diffs.add(microbatches, self._accumulate(microbatches, _UNKNOWN))
            return
        self._kept.setdefault(minibatch, []).extend(microbatches)
        if self._recomputes_old and not self._is_one_block:
            self._diffs.add(microbatches, self._forward_old(microbatches))

    def apply(self, totals: Sequence[Totals], version: int) -> dict[str, float]:
        """Makes all updates of the role, which is at `version`, on the mini-batches, which have `totals`.

        Returns metrics, the same on every rank: means over the updates.

        Raises:
            PreconditionFailed: The engine's and the trainer's log-probabilities differ too much. Nothing is applied.
                Or the gradient of the first update is not finite and `optim.on_nonfinite` is fail.
            RuntimeError: A later update failed, so that a part of the batch is applied.
        """
        if self._is_one_block:
            self._accumulate_first(totals[0])
        diff = self._require_agreement(totals)
        num_updates = self._config.num_epochs * len(totals)
        metrics: list[dict[str, float]] = []
        for index in range(num_updates):
            number = index % len(totals)
            try:
                if index:
                    self._accumulate(self._kept[number], totals[number])
                # Numbered by the version, so that learning rate and weight decay need no state in checkpoints.
                metrics.append(self._apply_gradient(totals[number], version * num_updates + index))
            except LockstepError as error:
                if not index:
                    raise
                # Ends the trainer, which would hold neither the weights before the batch nor those after it.
                raise RuntimeError(
                    f"update {index + 1} of a batch failed when those before it were applied; resume from a "
                    f"checkpoint: {error.message}"
                ) from error
        return means_of(metrics) | diff | self._replayed.metrics()

    def drop(self) -> None:
        self._backend.discard_gradients()

    @property
    def _recomputes_old(self) -> bool:
        return self._is_compared and self._config.loss.old_logprobs == "recompute"

    def _accumulate_first(self, totals: Totals) -> None:
        """Computes the first mini-batch of a batch of one block, and compares it as `apply` needs it."""
        # The old policy is the one before the first update. The first mini-batch gets it from its own forward.
        numbers = sorted(self._kept) if self._recomputes_old else [0]
        first, later = self._kept[0], [one for number in numbers[1:] for one in self._kept[number]]
        later_outputs = self._forward_old(later) if later else []
        outputs = self._accumulate(first, totals)
        if self._is_compared:
            self._diffs.add([*first, *later], [*outputs, *later_outputs])
        if self._recomputes_old:  # for the epochs after the first
            _set_old(first, outputs)

    def _forward_old(self, microbatches: Sequence[Microbatch]) -> Sequence[torch.Tensor]:
        # Only the sampled tokens' log-probabilities are wanted; each token of a teacher would be one more output.
        without_teacher = [replace(microbatch, teacher_tokens_NK=None) for microbatch in microbatches]
        outputs = self._backend.forward(without_teacher, self._temperature)
        _set_old(microbatches, outputs)
        return outputs

    def _accumulate(self, microbatches: Sequence[Microbatch], totals: Totals) -> Sequence[torch.Tensor]:
        """Adds the gradient of micro-batches of a mini-batch with `totals`, and returns their outputs."""
        if self._is_compared and self._config.loss.needs_covariance:
            self._set_covariance(microbatches, totals)
        loss = self._loss(totals if self._is_one_block else _UNKNOWN)
        outputs, sums = self._backend.accumulate(microbatches, self._temperature, loss, is_whole=self._is_one_block)
        self._sums |= {name: self._sums.get(name, 0.0) + float(value) for name, value in sums.items()}
        self._replayed.add(self._backend, microbatches)
        return outputs

    def _loss(self, totals: Totals) -> LossFunction:
        config = self._config.loss

        def loss(outputs_KN: torch.Tensor, microbatch: Microbatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            outputs_2N = outputs_KN[:2]
            # A recomputed old_logprobs column takes precedence. Otherwise the old policy is the engine's or the policy
            # itself, for which the ratio is exactly 1.
            is_engine = config.old_logprobs == "engine"
            old_N = microbatch.columns["behavior_logprobs"] if is_engine else outputs_2N[0].detach()
            columns = {"old_logprobs": old_N, **microbatch.columns}
            value, metrics = policy_loss(outputs_2N, columns, microbatch.completion_lengths, totals, config)
            if microbatch.teacher_tokens_NK is None or microbatch.teacher_logprobs_NK is None:
                return value, metrics
            teacher = microbatch.teacher_tokens_NK, microbatch.teacher_logprobs_NK
            more, kl = distill_loss(outputs_KN[2:], teacher, columns, totals, config)
            return value + more, {**metrics, "loss": metrics["loss"] + more.detach(), "distill_kl": kl}

        return loss

    def _set_covariance(self, microbatches: Sequence[Microbatch], totals: Totals) -> None:
        means_2 = self._backend.reduce(
            covariance_sums([microbatch.columns for microbatch in microbatches]), dist.ReduceOp.SUM
        )
        means_2 /= totals.num_tokens
        for microbatch in microbatches:
            microbatch.columns["covariance"] = covariance(microbatch.columns, means_2)

    def _require_agreement(self, totals: Sequence[Totals]) -> dict[str, float]:
        """Returns the difference between engine and trainer on the trained tokens of all ranks, if it is measured.

        Raises:
            PreconditionFailed: The mean difference is above the config's limit or, with a lag, the effective sample
                size is below its limit. The gradients are discarded.
        """
        if not self._is_compared:
            return {}
        # The numbers are sums over all ranks, so all of them raise or none: otherwise some would wait in the next
        # collective.
        compared = totals if self._recomputes_old else totals[:1]
        metrics = self._diffs.metrics(self._backend, sum(minibatch.num_tokens for minibatch in compared))
        mean, ess, config = metrics["logprob_diff_mean"], metrics["logprob_diff_ess"], self._config
        if not mean <= config.max_logprob_diff:  # "not <=" so that NaN is rejected too
            self._backend.discard_gradients()
            moved = f", or the policy has moved too far (trainer.lag; effective sample size {ess:.4g})"
            lag = moved if config.lag.versions else ""
            raise PreconditionFailed(
                f"the engine and the trainer disagree{lag}: their log-probabilities differ "
                f"by {mean:.4g} on average, more than trainer.max_logprob_diff {config.max_logprob_diff:g}; nothing "
                "was applied",
                reason=Reason.LOGPROB_DIFF,
                **metrics,
            )
        if config.lag.versions and not ess >= config.lag.min_ess:
            self._backend.discard_gradients()
            raise PreconditionFailed(
                f"the effective sample size of the importance weights is {ess:.4g} of the tokens, less than "
                f"trainer.lag.min_ess {config.lag.min_ess:g}: the policy has moved too far from the weights that were "
                "sampled; nothing was applied",
                reason=Reason.LOW_ESS,
                **metrics,
            )
        return metrics

    def _apply_gradient(self, totals: Totals, number: int) -> dict[str, float]:
        """Applies the gradient of a mini-batch as update `number`, counted over the run.

        Returns its metrics, with the gradient's norm, and whether it was skipped because this is not finite.

        Raises:
            PreconditionFailed: NONFINITE_GRADIENT, it is not finite and `optim.on_nonfinite` is fail. It was not
                applied.
        """
        means, self._sums = self._sums, {}
        if not self._is_one_block:
            is_token_mean = self._config.loss.aggregation == "token_mean"
            count = totals.num_tokens if is_token_mean else totals.num_sequences
            self._backend.complete_blocks(1 / count)
            means = {name: value / (count if name in _LOSSES else totals.num_tokens) for name, value in means.items()}
        optim = self._config.optim
        lr = learning_rate(optim, number)
        norm = self._backend.step(lr, weight_decay(optim, number))
        if not math.isfinite(norm) and optim.on_nonfinite == "fail":
            raise PreconditionFailed(
                f"the gradient of update {number} has norm {norm} and was not applied; look at the samples of this "
                "step, lower optim.lr, or set optim.on_nonfinite to skip",
                reason=Reason.NONFINITE_GRADIENT,
            )
        return self._update_metrics(means) | {"grad_norm": norm, "lr": lr, "skipped": float(not math.isfinite(norm))}

    def _update_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of an update, given the means over its mini-batch."""
        return means


class CriticUpdate(BatchUpdate):
    """Updates the critic on one batch, which is one block. Reads returns instead of advantages."""

    def __init__(self, backend: Backend, config: CriticSettings):
        super().__init__(backend, config, 1.0, is_one_block=True)
        self._is_compared, self._value_loss = False, config.value_loss

    def apply(self, totals: Sequence[Totals], version: int) -> dict[str, float]:
        return {f"critic_{name}": value for name, value in super().apply(totals, version).items()}

    def _loss(self, totals: Totals) -> LossFunction:
        return lambda outputs_1N, microbatch: value_loss(outputs_1N[0], microbatch.columns, totals, self._value_loss)

    def _update_metrics(self, means: dict[str, float]) -> dict[str, float]:
        shown = {name: means[name] for name in ("loss", "clip_fraction", "value_mean", "return_mean")}
        return shown | {"explained_variance": explained_variance(means)}


def means_of(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the applied updates of a batch, and the number of others as `skipped`.

    If none was applied, the means are over all of them, with 0 in place of numbers that are not finite.
    """
    applied = [update for update in metrics if not update["skipped"]]
    used = applied or [{name: x if math.isfinite(x) else 0.0 for name, x in update.items()} for update in metrics]
    names = dict.fromkeys(name for update in used for name in update)  # a user's loss may return others for each
    means = {name: sum(update.get(name, 0.0) for update in used) / len(used) for name in names}
    return means | {"skipped": float(len(metrics) - len(applied))}


def _set_old(microbatches: Sequence[Microbatch], outputs: Sequence[torch.Tensor]) -> None:
    """Makes the log-probabilities in `outputs` those of the old policy."""
    for microbatch, outputs_2N in zip(microbatches, outputs, strict=True):
        microbatch.columns["old_logprobs"] = outputs_2N[0].detach()


class LogprobDiffs:
    """Adds up one rank's differences between behavior and trainer log-probabilities over its trained tokens."""

    def __init__(self, device: torch.device) -> None:
        self._sums_4 = torch.zeros(4, dtype=torch.float64, device=device)
        """Sums of |behavior - trainer|, of the k3 estimate of their KL divergence, of w and of w^2; w is the importance
        weight exp(trainer - behavior)."""
        self._largest_1 = torch.zeros(1, dtype=torch.float64, device=device)
        """Maximum of |behavior - trainer|."""

    def add(self, microbatches: Sequence[Microbatch], outputs: Sequence[torch.Tensor]) -> None:
        is_trained_N = torch.cat([microbatch.columns["loss_mask"] for microbatch in microbatches]) > 0
        behavior_N = torch.cat([microbatch.columns["behavior_logprobs"] for microbatch in microbatches])
        trainer_N = torch.cat([outputs_2N[0] for outputs_2N in outputs])[is_trained_N].double()
        log_weight_N = trainer_N - behavior_N[is_trained_N].double()
        weight_N, diff_N = log_weight_N.exp(), log_weight_N.abs()
        kl_N = torch.expm1(log_weight_N) - log_weight_N  # unlike the loss's k3 without a bound: it measures
        self._sums_4 += torch.stack([x.sum() for x in (diff_N, kl_N, weight_N, weight_N.square())])
        # Together with the largest so far: a rank may have no trained token, and torch has no maximum of nothing.
        self._largest_1 = torch.cat([self._largest_1, diff_N]).amax(0, keepdim=True)

    def metrics(self, backend: Backend, num_tokens: int) -> dict[str, float]:
        """Returns the differences on the `num_tokens` trained tokens of all ranks.

        These are the mean and the maximum of |behavior - trainer|, the k3 estimate of their KL divergence, and the
        effective sample size of the importance weights w as a share of n tokens, (sum w)^2 / (n sum w^2), which is 1 if
        they agree exactly.
        """
        diff, kl, weight, weight_square = backend.reduce(self._sums_4, dist.ReduceOp.SUM) / num_tokens
        return {
            "logprob_diff_mean": float(diff),
            "logprob_diff_max": float(backend.reduce(self._largest_1, dist.ReduceOp.MAX)),
            "logprob_diff_kl": float(kl),
            "logprob_diff_ess": float(weight.square() / weight_square),
        }


class Replayed:
    """Counts the routed experts of one batch that were replayed."""

    def __init__(self) -> None:
        self._num_tokens = self._num_experts = self._num_agreeing = 0.0

    def add(self, backend: Backend, microbatches: Sequence[Microbatch]) -> None:
        """Compares `microbatches`, which `backend` has just accumulated, with what it has replayed.

        Raises:
            InternalError: Some token of some layer was computed with other experts. The gradients are discarded.
        """
        routed_experts = [microbatch.experts_TLK for microbatch in microbatches if microbatch.experts_TLK is not None]
        if not routed_experts:
            return
        num_layers, top_k = microbatches[0].num_expert_layers, routed_experts[0].shape[-1]
        num_tokens = torch.tensor(float(sum(map(len, routed_experts))), dtype=torch.float64, device=backend.device)
        num_tokens = float(backend.reduce(num_tokens, dist.ReduceOp.SUM))
        counts = backend.replayed().tolist()
        # Equal numbers on all ranks, so that all raise or none.
        if counts[0] != num_tokens * num_layers:
            backend.discard_gradients()
            raise InternalError(
                f"{counts[0]:g} routed experts of {num_tokens:g} tokens x {num_layers} layers were replayed, so some "
                "were ignored; nothing was applied. Set trainer.moe.router_replay to off to train without them"
            )
        self._num_tokens += num_tokens
        self._num_experts += counts[0] * top_k
        self._num_agreeing += counts[1]

    def metrics(self) -> dict[str, float]:
        """Returns the number of replayed tokens, prompts included, and the share of their experts that the trainer's
        router would have chosen too; nothing if the batch has no routed experts."""
        if not self._num_tokens:
            return {}
        return {"moe_replayed_tokens": self._num_tokens, "moe_router_agreement": self._num_agreeing / self._num_experts}
