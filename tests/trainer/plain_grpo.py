"""GRPO as the papers write it: float64, one sample at a time, plain torch. What the trainer is compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from services.common.config.loss import LossConfig
from services.common.config.trainer import TrainerConfig

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]


def score(model: torch.nn.Module, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of each completion token."""
    prompt, completion = row["prompt_tokens"], row["tokens"]
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0] / temperature
    logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs[range(len(completion)), completion], -(logprobs.exp() * logprobs).sum(-1)


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
    for part in _minibatches(rows, config.num_minibatches):
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
    losses = []  # one tensor of token losses per sample
    for row, old in part:
        logprobs, entropy = score(model, row, temperature)
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        advantages = torch.tensor(row["advantages"], dtype=torch.float64)
        tokens = -torch.minimum(advantages * ratio, advantages * clipped) - config.entropy_coef * entropy
        if config.kl_coef:
            off = torch.tensor(row["ref_logprobs"], dtype=torch.float64) - logprobs
            tokens = tokens + config.kl_coef * (off.exp() - off - 1)
        losses.append(tokens)
    if config.aggregation == "token_mean":
        return torch.cat(losses).mean()
    if config.aggregation == "seq_mean_token_mean":
        return torch.stack([tokens.mean() for tokens in losses]).mean()
    longest = max(len(tokens) for tokens in losses)
    return torch.stack([tokens.sum() / longest for tokens in losses]).mean()
