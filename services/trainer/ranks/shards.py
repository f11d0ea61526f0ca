"""Splits a batch into each rank's part."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.common.batches import batch as batches
from services.common.batches.blocks import packed_lengths, trained_tokens
from services.common.config.layout import packs_multiple
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.trainer.backend import Role
from services.trainer.losses import Totals
from services.trainer.ranks.calls import Message
from services.trainer.samples import PER_TOKEN
from services.trainer.updates.packing import assign

_COLUMNS = ["prompt_tokens", "tokens", *PER_TOKEN]


def train_parts(samples: pa.Table, config: TrainerConfig, num_ranks: int, role: Role = Role.POLICY) -> list[Message]:
    """Returns each rank's samples for `Worker.train`, in the order of its packs, and how they are packed.

    Raises:
        InvalidInput: The loss needs a column that is missing, or the batch cannot be split as the config asks.
    """
    _require_needed(samples, config, role)
    trained = trained_tokens(samples)
    minibatches: list[list[dict[str, object]]] = [[] for _ in range(num_ranks)]
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    for rows in _minibatch_rows(samples, config.num_minibatches):
        part = samples.take(pa.array(rows))
        counts = trained[rows]
        totals = Totals(int(counts.sum()), int((counts > 0).sum()))
        if not totals.num_tokens:
            raise InvalidInput("loss_mask: masks every token of a mini-batch", field="loss_mask")
        for rank, packs in enumerate(_assign(part, config, num_ranks)):
            orders[rank] += [int(rows[index]) for pack in packs for index in pack]
            minibatches[rank].append({"packs": [len(pack) for pack in packs], "totals": asdict(totals)})
    narrow = samples.select(_columns(samples, config, role))
    return [
        Message({"minibatches": minibatches[rank]}, list(batches.encode(narrow.take(pa.array(orders[rank])))))
        for rank in range(num_ranks)
    ]


def groups_per_minibatch(samples: pa.Table, num_minibatches: int) -> int:
    """Returns the number of prompt groups in each of `num_minibatches` mini-batches.

    Raises:
        InvalidInput: The groups cannot be split equally.
    """
    num_groups = pc.count_distinct(samples["group"]).as_py()
    if num_groups % num_minibatches:
        raise InvalidInput(
            f"{num_groups} prompt groups cannot be split into trainer.num_minibatches {num_minibatches}",
            field="trainer.num_minibatches",
        )
    return num_groups // num_minibatches


def block_parts(block: pa.Table, config: TrainerConfig, num_ranks: int) -> list[Message]:
    """Returns each rank's samples for `Worker.add_block`, in the order of its packs, and how they are packed.

    Raises:
        InvalidInput: As in `train_parts`.
    """
    _require_needed(block, config, Role.POLICY)
    return [part for part, _ in _packed(block, config, num_ranks, Role.POLICY)]


def forward_parts(
    samples: pa.Table, config: TrainerConfig, num_ranks: int, role: Role = Role.POLICY
) -> tuple[list[Message], np.ndarray]:
    """Returns each rank's samples for `Worker.forward`, and the order that restores the rows of `samples`.

    Row i of `samples` is row order[i] of the concatenated answers.
    """
    packed = _packed(samples, config, num_ranks, role)
    return [part for part, _ in packed], np.argsort([row for _, rows in packed for row in rows])


def vocab_size_of(config_json: bytes) -> int:
    """Returns the vocabulary size of the model with this config.json."""
    content = json.loads(config_json)
    return int(content.get("vocab_size") or content["text_config"]["vocab_size"])


def _packed(samples: pa.Table, config: TrainerConfig, num_ranks: int, role: Role) -> list[tuple[Message, list[int]]]:
    """Returns for each rank its samples, in the order of its packs, with the packs' sizes; and its rows."""
    narrow = samples.select(_columns(samples, config, role))
    found = []
    for packs in _assign(samples, config, num_ranks):
        rows = [index for pack in packs for index in pack]
        frames = list(batches.encode(narrow.take(pa.array(rows))))
        found.append((Message({"packs": [len(pack) for pack in packs]}, frames), rows))
    return found


def _require_needed(samples: pa.Table, config: TrainerConfig, role: Role) -> None:
    for name in _needed(config, role):
        if samples[name].null_count:
            raise InvalidInput(f"{name}: required to train the {role} with this loss", field=name)


def _columns(samples: pa.Table, config: TrainerConfig, role: Role) -> list[str]:
    """Returns the columns that the ranks need: routes only for the policy, since other models choose themselves."""
    replays = role is Role.POLICY and config.replays_routes and not samples["routes"].null_count
    is_cut = role is not Role.CRITIC and not samples["kept"].null_count
    return [*_COLUMNS, *["routes"] * replays, *["kept"] * is_cut]


def _needed(config: TrainerConfig, role: Role) -> tuple[str, ...]:
    if role is Role.CRITIC:
        return ("values", "returns")
    advantages = () if config.loss.kind == "sft" else ("advantages",)
    routes = ("routes",) if config.moe.replay_routes == "on" else ()
    return (*advantages, *(("ref_logprobs",) if config.loss.kl_coef else ()), *routes)


def _assign(samples: pa.Table, config: TrainerConfig, num_ranks: int) -> list[list[list[int]]]:
    return assign(
        packed_lengths(samples).tolist(),
        num_ranks=num_ranks,
        max_tokens=config.max_tokens_per_microbatch,
        multiple_of=packs_multiple(config),
    )


def _minibatch_rows(samples: pa.Table, num_minibatches: int) -> Sequence[np.ndarray]:
    size, group = groups_per_minibatch(samples, num_minibatches), samples["group"].to_numpy()
    groups = np.unique(group)
    return [np.flatnonzero(np.isin(group, groups[at : at + size])) for at in range(0, len(groups), size)]
