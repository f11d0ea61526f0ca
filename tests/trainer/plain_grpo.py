"""Computes losses as the papers write them, one sample at a time, in float64 and plain torch.

The trainer is compared with them.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from services.common.batches import decode_top_k
from services.common.config.loss import CorrectionConfig, LossConfig
from services.common.config.trainer import TrainerConfig

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]


def score(model: torch.nn.Module, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probability and the entropy of each completion token."""
    prompt, completion = row["prompt_tokens"], row["tokens"]
    if row.get("routed_experts"):
        _replay(model, row["routed_experts"], len(prompt) + len(completion))
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0] / temperature
    if not row.get("sampling_mask"):
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return logprobs[range(len(completion)), completion], -(logprobs.exp() * logprobs).sum(-1)
    scored = []
    for place, token in enumerate(completion):
        mask = _mask_of(row, place) or list(range(logits.size(-1)))
        logprobs = logits[len(prompt) - 1 + place, mask].log_softmax(-1)
        scored.append((logprobs[mask.index(token)], -(logprobs.exp() * logprobs).sum()))
    return torch.stack([logprob for logprob, _ in scored]), torch.stack([entropy for _, entropy in scored])


def distributions(model: torch.nn.Module, row: Row, temperature: float) -> torch.Tensor:
    """Returns the probabilities of all tokens at each place of the completion, [T, V]; 0 outside of its mask."""
    prompt, completion = row["prompt_tokens"], row["tokens"]
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    for place in range(len(completion) if row.get("sampling_mask") else 0):
        if mask := _mask_of(row, place):
            others = torch.ones(logits.size(-1), dtype=torch.bool)
            others[mask] = False
            logits[place].masked_fill_(others, -torch.inf)
    return logits.softmax(-1)


def divergence(probs_TV: torch.Tensor, row: Row, kl: str) -> torch.Tensor:
    """Returns the divergence of the teacher's k tokens, and all others as one, at each place, [T]."""
    divergences = []
    for probs_V, tokens, logprobs in zip(probs_TV, *decode_top_k(row["teacher_top_k"], len(probs_TV)), strict=True):
        is_token = tokens >= 0
        others_V = torch.ones(len(probs_V), dtype=torch.bool)
        others_V[tokens[is_token]] = False
        policy = torch.cat([probs_V[tokens[is_token]], probs_V[others_V].sum()[None]])
        teacher = torch.tensor(logprobs[[*is_token, True]], dtype=torch.float64).exp()
        is_possible = policy > 0
        p, q = (policy, teacher) if kl == "reverse" else (teacher, policy)
        p, q = p[is_possible], q[is_possible]
        divergences.append((p * (p / q).log()).sum())
    return torch.stack(divergences)


def _mask_of(row: Row, place: int) -> list[int]:
    """Returns the sampling mask of the completion's token at `place`, which is empty if it has none."""
    numbers = torch.frombuffer(bytearray(row["sampling_mask"]), dtype=torch.int32).tolist()
    counts, mask = numbers[: len(row["tokens"])], numbers[len(row["tokens"]) :]
    return mask[sum(counts[:place]) : sum(counts[: place + 1])]


def _replay(model: torch.nn.Module, routed_experts: bytes, num_tokens: int) -> None:
    """Makes the routers choose `routed_experts`, one byte each, in the next forward; those of the last token are
    arbitrary."""
    layers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    read = torch.frombuffer(bytearray(routed_experts), dtype=torch.uint8).long().view(num_tokens - 1, len(layers), -1)
    chosen = torch.cat([read, read[-1:]])
    for number, gate in enumerate(layers):
        gate.forward = functools.partial(_gate, gate, chosen[:, number])


def _gate(gate: Any, experts: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
    scores = logits.softmax(-1).gather(-1, experts)
    return logits, scores / scores.sum(-1, keepdim=True) if gate.norm_topk_prob else scores, experts


def update(directory: Path, rows: Sequence[Row], config: TrainerConfig, temperature: float) -> Result:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    named, optim = dict(model.named_parameters()), config.optim
    optimizer = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.0 if "norm" in name else optim.weight_decay} for name, p in named.items()],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
    )
    with torch.no_grad():
        old = [score(model, row, temperature)[0] for row in rows]
    metrics: list[dict[str, float]] = []
    for part in _minibatches(rows, config.num_minibatches) * config.num_epochs:
        optimizer.zero_grad()
        loss = _loss(model, [(rows[i], old[i]) for i in part], config.loss, temperature)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in named.items()}
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients.values()]))
        for p in named.values():
            p.grad *= min(1.0, optim.max_grad_norm / float(norm))
        optimizer.step()
        metrics.append({"loss": loss.item(), "grad_norm": norm.item()})
    mean = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
    return Result(gradients, {name: p.detach() for name, p in named.items()}, mean)


def _minibatches(rows: Sequence[Row], count: int) -> list[list[int]]:
    groups = sorted({row["group"] for row in rows})
    share = len(groups) // count
    parts = [groups[i * share : (i + 1) * share] for i in range(count)]
    return [[i for i, row in enumerate(rows) if row["group"] in part] for part in parts]


def _loss(
    model: torch.nn.Module, part: Sequence[tuple[Row, torch.Tensor]], config: LossConfig, temperature: float
) -> torch.Tensor:
    scored = [(*score(model, row, temperature), tensors(row) | {"old_logprobs": old}) for row, old in part]
    if config.distill.coef:
        for (_, _, columns), (row, _) in zip(scored, part, strict=True):
            columns["divergence"] = divergence(distributions(model, row, temperature), row, config.distill.kl)
    return batch_loss(scored, config)


def tensors(row: Row) -> dict[str, torch.Tensor]:
    """Returns the columns that a loss reads of a sample, each float64 [tokens]."""
    lists = {"behavior_logprobs": row["logprobs"], "loss_mask": row.get("loss_mask") or [1.0] * len(row["tokens"])}
    lists |= {name: row[name] for name in ("advantages", "ref_logprobs") if row.get(name)}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in lists.items()}


Scored = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def batch_loss(batch: Sequence[Scored], config: LossConfig) -> torch.Tensor:
    """Returns the loss of a mini-batch of sequences, each given as its log-probabilities, entropy and columns."""
    means = [
        torch.cat([columns[name][columns["loss_mask"] > 0] for _, _, columns in batch]).mean()
        for name in ("behavior_logprobs", "advantages")
        if config.needs_covariance
    ]
    losses = []
    for logprobs, entropy, columns in batch:
        is_trained = columns["loss_mask"] > 0
        if not is_trained.any():
            continue
        columns = {name: values[is_trained] for name, values in columns.items()}
        if means:
            columns["covariance"] = (columns["behavior_logprobs"] - means[0]) * (columns["advantages"] - means[1])
        tokens = _corrections(columns, config.correction) * _token_losses(logprobs[is_trained], columns, config)
        tokens = tokens - config.entropy_coef * entropy[is_trained]
        if config.kl_coef:
            tokens = tokens + config.kl_coef * _kl(logprobs[is_trained] - columns["ref_logprobs"], config.kl_kind)
        if config.distill.coef:
            tokens = tokens + config.distill.coef * columns["divergence"]
        losses.append(tokens)
    if config.aggregation == "token_mean":
        return torch.cat(losses).mean()
    if config.aggregation == "seq_mean_token_mean":
        return torch.stack([tokens.mean() for tokens in losses]).mean()
    return torch.stack([tokens.sum() / (config.norm_tokens or 1) for tokens in losses]).mean()


def _token_losses(logprobs: torch.Tensor, columns: dict[str, torch.Tensor], config: LossConfig) -> torch.Tensor:
    if config.kind == "sft":
        return -logprobs
    advantages = columns["advantages"]
    ratio = (logprobs - columns["old_logprobs"]).exp()
    match config.kind:
        case "gspo" | "gmpo":
            return _of_sequence(ratio, advantages, config)
        case "python":  # tests.user_functions:soft_clip
            weight = (-config.kwargs["temperature"] * ratio.detach().log().abs()).exp()
            return -advantages * ratio * weight
        case "cispo":
            return -ratio.detach().clamp(config.cispo.min_ratio, config.cispo.max_ratio) * advantages * logprobs
        case "sapo":
            taus = [config.sapo.tau_positive if a > 0 else config.sapo.tau_negative for a in advantages.tolist()]
            tau = torch.tensor(taus, dtype=torch.float64)
            return -advantages / (1 + (-tau * (ratio - 1)).exp()) * 4 / tau
        case "clip_cov" | "kl_cov":
            return _by_covariance(logprobs, columns, config)
        case "dppo":
            # Where the ratio is bounded, the gradient is that of a weighted log-probability.
            bound = config.dppo.max_ratio * (1 + logprobs - logprobs.detach())
            weights = torch.where(ratio > config.dppo.max_ratio, bound, ratio)
            is_within = _within_divergence(logprobs.exp(), columns["old_logprobs"].exp(), columns, config)
            return -advantages * weights * is_within
        case "reinforce":
            return -advantages * logprobs
        case "grpo" | "ppo":
            return _dual_clipped(ratio, advantages, config)
        case kind:
            raise NotImplementedError(f"no plain formula for the loss {kind}")


def _of_sequence(ratio: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Returns the sequence forms of the papers; the trainer has the token forms."""
    if config.kind == "gspo":
        mean = ratio.log().mean().exp().expand(len(ratio))
        return _clipped(mean, advantages, config.gspo.clip_low, config.gspo.clip_high)
    low, high = math.exp(-config.gmpo.clip_low), math.exp(config.gmpo.clip_high)
    sign = advantages.sign()
    tokens = torch.minimum(ratio**sign, ratio.clamp(low, high) ** sign) ** sign
    return -advantages * tokens.prod() ** (1 / len(ratio))


def _by_covariance(logprobs: torch.Tensor, columns: dict[str, torch.Tensor], config: LossConfig) -> torch.Tensor:
    advantages, covariance = columns["advantages"], columns["covariance"]
    log_ratio = logprobs - columns["old_logprobs"]
    if config.kind == "clip_cov":
        chosen = (covariance < config.clip_cov.min_covariance).double()
        return chosen * _clipped(log_ratio.exp(), advantages, config.clip_low, config.clip_high)
    chosen = (covariance >= config.kl_cov.min_covariance).double()
    return -advantages * log_ratio.exp() + chosen * config.kl_cov.coef * log_ratio.abs()


def _dual_clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> torch.Tensor:
    losses = _clipped(ratio, advantages, config.clip_low, config.clip_high)
    if config.clip_dual:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * config.clip_dual), losses)
    return losses


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return -torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - low, 1 + high))


def _within_divergence(
    new: torch.Tensor, old: torch.Tensor, columns: dict[str, torch.Tensor], config: LossConfig
) -> torch.Tensor:
    divergence = (new - old).abs()
    if config.dppo.divergence == "kl":
        divergence = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    onward = torch.where(columns["advantages"] > 0, new > old, new < old)
    return (~(onward & (divergence > config.dppo.threshold))).double()


def _corrections(columns: dict[str, torch.Tensor], config: CorrectionConfig) -> torch.Tensor:
    ratio = (columns["old_logprobs"] - columns["behavior_logprobs"]).exp()
    factor = torch.ones_like(ratio)
    if config.weight == "token":
        factor = ratio.clamp(max=config.weight_cap)
    if config.weight == "sequence":
        factor = factor * min(float(ratio.prod()), config.weight_cap)
    if config.token_mask:
        factor = factor * ((ratio >= config.token_mask[0]) & (ratio <= config.token_mask[1]))
    if config.geometric_mask:
        mean = float(ratio.prod()) ** (1 / len(ratio))
        factor = factor * (config.geometric_mask[0] <= mean <= config.geometric_mask[1])
    if config.veto is not None and float(ratio.min()) < config.veto:
        factor = factor * 0
    return factor


def _kl(off: torch.Tensor, kind: str) -> torch.Tensor:
    near = off.clamp(-20, 20)
    k3 = ((-near).exp() - 1 + near).clamp(max=10)
    return {"k1": off, "k2": off**2 / 2, "k3": k3, "abs": off.abs()}[kind]
