"""Checks samples before anything is computed from them, and splits them into each rank's part."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.common import batches
from services.common.batches import begins_of_samples
from services.common.config.layout import microbatches_multiple
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.common.routed_experts import RoutedExpertsShape
from services.trainer.backend import Role
from services.trainer.ranks.calls import Message
from services.trainer.updates.packing import assign

# Columns with one value per completion token. All but the first may be missing.
PER_TOKEN = ["logprobs", "loss_mask", "ref_logprobs", "teacher_logprobs", "values", "advantages", "returns"]

# A log-probability is computed from float32 logits. Below 8192, these are rounded by less than this number.
_ROUNDING = 1e-3
# No softmax over such logits, divided by the lowest temperature, gives less.
_LOWEST_LOGPROB = -2e6
# Times the largest ratio that a loss computes (losses/kinds.py: e^20 = 5e8), its square is 1e35 and still a float32, as
# the square of a gradient's norm must be.
_LARGEST = 1e9
_BOUNDS = {
    **dict.fromkeys(("group", "sample"), (0, np.inf)),
    **dict.fromkeys(("logprobs", "ref_logprobs", "teacher_logprobs"), (_LOWEST_LOGPROB, _ROUNDING)),
    **dict.fromkeys(("values", "advantages", "returns"), (-_LARGEST, _LARGEST)),
}
_AS_LISTS = pa.list_(pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.float64())]))


def check_samples(samples: pa.Table, *, vocab_size: int, routed_experts: RoutedExpertsShape | None) -> None:
    """Rejects samples that would make a rank fail, or silently train on wrong data.

    Raises:
        InvalidInput: A column has an empty list, a length that differs from the tokens', a token outside the
            vocabulary, a value that is missing, not finite or impossible for its column; turns are not parts of their
            sample, or a token outside of them is trained on; or a function below refuses its bytes. The message names
            the column and the first such row.
    """
    for field in batches.SAMPLE_SCHEMA:
        if not field.nullable:
            _refuse(samples[field.name].is_null().to_numpy(), field.name, "is missing")
    num_tokens = _lengths(samples, "tokens")
    for name in ("prompt_tokens", "tokens"):
        _refuse(_lengths(samples, name) == 0, name, "is empty")
    for name in (name for name in PER_TOKEN if samples[name].null_count < samples.num_rows):
        _refuse(samples[name].is_null().to_numpy(), name, "is missing")
        _refuse(_lengths(samples, name) != num_tokens, name, "differs in length from tokens")
    for name in (name for name in batches.SAMPLE_SCHEMA.names if name != "calls"):  # those are for people
        _check_values(samples, name, vocab_size)
    if samples["turn_begins"].null_count < samples.num_rows:
        _check_turns(samples, num_tokens)
    check_routed_experts(samples, routed_experts)
    check_sampling_masks(samples, vocab_size=vocab_size)
    check_teacher_top_k(samples, vocab_size=vocab_size)


def check_routed_experts(samples: pa.Table, shape: RoutedExpertsShape | None) -> None:
    """Rejects routed experts that are not those of `samples` and of a model whose routed experts have `shape`.

    Raises:
        InvalidInput: Some rows have routed experts and others none, or the model has none; routed experts have another
            number of tokens, name an expert that does not exist, or name one twice for a token.
    """
    routed_experts = samples["routed_experts"]
    if routed_experts.null_count == samples.num_rows:
        return
    if shape is None:
        raise _refusal("routed_experts", "the layers of this model have no experts, or are not known")
    _refuse(routed_experts.is_null().to_numpy(), "routed_experts", "is missing")
    has_others = pc.binary_length(routed_experts).to_numpy() != batches.packed_lengths(samples) * shape.row_bytes
    _refuse(has_others, "routed_experts", "has another number of tokens")
    for index, row in enumerate(routed_experts):
        experts_TLK = shape.decode(row.as_buffer())
        if (highest := experts_TLK.max()) >= shape.num_experts:
            problem = f"row {index} names expert {highest}, but there are only {shape.num_experts}"
            raise _refusal("routed_experts", problem)
        # Slots of the engine that were never written would name expert 0 twice.
        chosen_TLK = experts_TLK[:, shape.expert_layers]
        if shape.top_k > 1 and (chosen_TLK[..., 1:] == chosen_TLK[..., :-1]).any():
            raise _refusal("routed_experts", f"row {index} names an expert twice for one token")


def check_sampling_masks(samples: pa.Table, *, vocab_size: int) -> None:
    """Rejects sampling masks that are not those of `samples`.

    Raises:
        InvalidInput: Some rows have sampling masks and others none; they are of another number of tokens, name a token
            outside the vocabulary, lack the token that was sampled, or are empty for a trained token.
    """
    masks = samples["sampling_mask"]
    if masks.null_count == samples.num_rows:
        return
    _refuse(masks.is_null().to_numpy(), "sampling_mask", "is missing")
    for index, (row, list_of_tokens) in enumerate(zip(masks, samples["tokens"], strict=True)):
        tokens = list_of_tokens.values.to_numpy()
        try:
            counts, kept_tokens = batches.decode_sampling_masks(row.as_buffer(), len(tokens))
        except ValueError as error:
            raise _refusal("sampling_mask", f"row {index}: {error}") from error
        if kept_tokens.size and kept_tokens.max() >= vocab_size:
            raise _refusal("sampling_mask", f"row {index} names token {kept_tokens.max()} of {vocab_size}")
        mask = samples["loss_mask"][index]
        must_have = mask.values.to_numpy(zero_copy_only=False) if mask.is_valid else np.ones(len(tokens), bool)
        if (without := ~batches.allows_sampled(tokens, counts, kept_tokens) & (must_have | (counts > 0))).any():
            where = int(without.argmax())
            problem = f"row {index} has a set without the sampled token {tokens[where]} at {where}"
            raise _refusal("sampling_mask", problem)


def check_teacher_top_k(samples: pa.Table, *, vocab_size: int) -> None:
    """Rejects tokens of a teacher that are not those of `samples`.

    Raises:
        InvalidInput: Some rows have them and others none; they are of another number of tokens, are not equally many,
            name a token outside of the vocabulary or one twice, or have impossible log-probabilities.
    """
    name = "teacher_top_k"
    if samples[name].null_count == samples.num_rows:
        return
    _refuse(samples[name].is_null().to_numpy(), name, "is missing")
    num_tokens, sizes = _lengths(samples, "tokens"), pc.binary_length(samples[name]).to_numpy()
    _refuse(sizes * num_tokens[0] != sizes[0] * num_tokens, name, "has another number of bytes for each token")
    for index, (row, count) in enumerate(zip(samples[name], num_tokens, strict=True)):
        try:
            tokens_TK, logprobs_TK = batches.decode_top_k(row.as_buffer(), count)
        except ValueError as error:
            raise _refusal(name, f"row {index}: {error}") from error
        ordered_TK = np.sort(tokens_TK)
        if ordered_TK.min() < batches.NO_TOKEN or ordered_TK.max() >= vocab_size:
            raise _refusal(name, f"row {index} names a token outside of a vocabulary of {vocab_size}")
        if ((ordered_TK[:, 1:] == ordered_TK[:, :-1]) & (ordered_TK[:, 1:] != batches.NO_TOKEN)).any():
            raise _refusal(name, f"row {index} names a token twice at one place")
        probs_TK = np.exp(np.minimum(logprobs_TK, 1))  # more than 1 is too much, and must not overflow
        probs_TK[:, :-1][tokens_TK == batches.NO_TOKEN] = 0
        if not (np.isfinite(logprobs_TK).all() and (abs(probs_TK.sum(1) - 1) <= _ROUNDING).all()):
            raise _refusal(name, f"row {index} has log-probabilities that are not those of a distribution")


def _check_values(samples: pa.Table, name: str, vocab_size: int) -> None:
    """Rejects values of a column, or of its lists, that are missing, not finite, or outside of the column's bounds."""
    values, lengths = samples[name], None
    if pa.types.is_map(values.type):
        values = values.cast(_AS_LISTS)
    if pa.types.is_list(values.type):
        values, lengths = pc.list_flatten(values), pc.fill_null(pc.list_value_length(values), 0).to_numpy()
    if pa.types.is_struct(values.type):
        values = pc.struct_field(values, "value")
    if lengths is not None and values.null_count:
        _refuse(_rows_of(values.is_null().to_numpy(), lengths), name, "has a missing value")
    is_token = name in ("prompt_tokens", "tokens")
    low, high = (0, vocab_size - 1) if is_token else _BOUNDS.get(name, (-np.inf, np.inf))
    if len(values) and (pa.types.is_floating(values.type) or np.isfinite(low)):
        numbers = pc.fill_null(values, 0).to_numpy()
        # Two numbers tell whether all is well; rows are looked for only if it is not.
        least, most = numbers.min(), numbers.max()  # nan if one of them is
        if not (np.isfinite([least, most]).all() and low <= least and most <= high):
            bad = ~(np.isfinite(numbers) & (numbers >= low) & (numbers <= high))
            allowed = f"a vocabulary of {vocab_size}" if is_token else f"{low:g} to {high:g}"
            _refuse(_rows_of(bad, lengths), name, f"has {numbers[bad.argmax()]:g}, which is not a number in {allowed}")


def _rows_of(values: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Returns which rows have a true one of `values`, which are those of lists of `lengths`, or one for each row."""
    if lengths is None:
        return values
    return np.bincount(np.repeat(np.arange(len(lengths)), lengths)[values], minlength=len(lengths)) > 0


def check_groups(samples: pa.Table) -> None:
    """Rejects a sample that is there twice, and a group with several prompts or a prompt with several groups.

    Only a batch to train on has groups: rows of a Forward may be repeated, so that every rank has one.

    Raises:
        InvalidInput: The message names the column and the first such row.
    """
    group, sample = samples["group"].to_numpy().astype(np.int64), samples["sample"].to_numpy()
    segment = pc.fill_null(samples["segment"], -1).to_numpy()
    _, firsts = np.unique(np.stack([group, sample, segment]), axis=1, return_index=True)
    is_again = np.ones(len(group), bool)
    is_again[firsts] = False
    _refuse(is_again, "sample", "is in the batch twice: its group has another row with its number")
    _check_segments(samples, segment)
    prompt = samples["prompt_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    _refuse(prompt != prompt[_first_rows(group)], "prompt_id", "has another prompt than its group")
    _refuse(group != group[_first_rows(prompt)], "group", "has a prompt that is in another group, too")
    if (segment >= 0).any():  # each call of an agent has a prompt of its own
        return
    lengths, first_rows = _lengths(samples, "prompt_tokens"), _first_rows(group)
    differs = "has another prompt than its group"
    _refuse(lengths != lengths[first_rows], "prompt_tokens", differs)
    begins, tokens = np.cumsum(lengths) - lengths, pc.list_flatten(samples["prompt_tokens"]).to_numpy()
    differences = tokens != tokens[np.repeat(begins[first_rows] - begins, lengths) + np.arange(len(tokens))]
    _refuse(_rows_of(differences, lengths), "prompt_tokens", differs)


def _check_segments(samples: pa.Table, segment: np.ndarray) -> None:
    """Rejects segments that do not follow each other or differ in the reward, and batches with both kinds of rows."""
    if (segment < 0).all():
        return
    _refuse(segment < 0, "segment", "is missing")
    begins = begins_of_samples(samples)
    first = np.repeat(begins, np.diff(begins, append=samples.num_rows))
    _refuse(segment != np.arange(samples.num_rows) - first, "segment", "does not follow the one before it")
    reward = samples["reward"].to_numpy()
    _refuse(reward != reward[first], "reward", "is not that of the first segment of its sample")


def _first_rows(keys: np.ndarray) -> np.ndarray:
    """Returns for each row the first row with the same key."""
    _, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return firsts[inverse]


def _check_turns(samples: pa.Table, num_tokens: np.ndarray) -> None:
    """Rejects turns that overlap or are not within their sample, and trained tokens outside of turns."""
    has_turns, counts = samples["turn_begins"].is_valid().to_numpy(), _lengths(samples, "turn_begins")
    for name in ("turn_ends", "turn_rewards", "environment"):
        _refuse(samples[name].is_valid().to_numpy() != has_turns, name, "is there without turn_begins, or these alone")
    for name in ("turn_ends", "turn_rewards"):
        _refuse(_lengths(samples, name) != counts, name, "differs in length from turn_begins")
    begins, ends = (pc.list_flatten(samples[name]).to_numpy() for name in ("turn_begins", "turn_ends"))
    rows, offsets = np.repeat(np.arange(len(counts)), counts), np.cumsum(num_tokens) - num_tokens
    is_later = np.diff(rows, prepend=-1) == 0
    least = np.where(is_later, np.concatenate([[0], ends[:-1]])[: len(ends)], 0)
    for name, bad in (("turn_begins", begins < least), ("turn_ends", (ends < begins) | (ends > num_tokens[rows]))):
        _refuse(np.bincount(rows[bad], minlength=len(counts)) > 0, name, "has turns that are not parts of the tokens")
    # +1 where a turn begins and -1 where it ends, so that the running sum is 0 outside of all turns. `np.add.at` adds
    # at an index as often as it is named; `marks[...] += 1` would add once.
    marks = np.zeros(num_tokens.sum() + 1, np.int64)
    np.add.at(marks, offsets[rows] + begins, 1)
    np.add.at(marks, offsets[rows] + ends, -1)
    is_foreign = (np.cumsum(marks)[:-1] == 0) & np.repeat(has_turns, num_tokens)
    if samples["loss_mask"].null_count == 0:
        is_foreign &= pc.list_flatten(samples["loss_mask"]).to_numpy(zero_copy_only=False)
    _refuse(_rows_of(is_foreign, num_tokens), "loss_mask", "trains on tokens outside of the policy's turns")


def _lengths(samples: pa.Table, name: str) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(samples[name]), 0).to_numpy()


def _refuse(bad: np.ndarray, column: str, what: str) -> None:
    if bad.any():
        raise _refusal(column, f"row {int(bad.argmax())} {what}")


def _refusal(column: str, problem: str) -> InvalidInput:
    return InvalidInput(f"{column}: {problem}", field=column)


_COLUMNS = ["prompt_tokens", "tokens", *PER_TOKEN]


def minibatch_rows(samples: pa.Table, num_minibatches: int) -> Sequence[np.ndarray]:
    """Returns the rows of each mini-batch, if prompt groups are split equally in the order of their numbers.

    Raises:
        InvalidInput: The groups cannot be split equally.
    """
    group = samples["group"].to_numpy()
    groups = np.unique(group)
    if len(groups) % num_minibatches:
        raise InvalidInput(
            f"{len(groups)} prompt groups cannot be split into trainer.num_minibatches {num_minibatches}",
            field="trainer.num_minibatches",
        )
    return [np.flatnonzero(np.isin(group, part)) for part in np.split(groups, num_minibatches)]


def train_parts(
    block: pa.Table,
    config: TrainerConfig,
    num_ranks: int,
    role: Role,
    rows: Mapping[int, np.ndarray],
    *,
    pads_rows: bool = False,
) -> list[Message]:
    """Returns each rank's samples for `Worker.add_block`, in the order of its micro-batches, and how they are packed.

    `rows` has the rows that belong to each mini-batch, by its number; `pads_rows` is the backend's.

    Raises:
        InvalidInput: The loss needs a column that is missing, or the samples cannot be split as the config asks.
    """
    for name in _needed(config, role):
        if block[name].null_count:
            raise _refusal(name, f"required to train the {role} with this loss")
    sizes: list[list[tuple[int, list[int]]]] = [[] for _ in range(num_ranks)]
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    for number, of_minibatch in rows.items():
        assigned = _assign(block.take(pa.array(of_minibatch)), config, num_ranks, pads_rows=pads_rows)
        for rank, microbatches in enumerate(assigned):
            orders[rank] += [int(of_minibatch[index]) for microbatch in microbatches for index in microbatch]
            sizes[rank].append((number, [len(microbatch) for microbatch in microbatches]))
    distills = role is Role.POLICY and config.loss.distill.coef > 0
    narrow = block.select([*_columns(block, config, role), *["teacher_top_k"] * distills])
    if block["segment"].null_count == 0:
        narrow = narrow.append_column("trained_tokens", trained_of_samples(block))
    return [
        Message({"minibatches": sizes[rank]}, list(batches.encode(narrow.take(pa.array(orders[rank])))))
        for rank in range(num_ranks)
    ]


def trained_of_samples(samples: pa.Table) -> pa.Array:
    """Returns for each row the number of trained tokens of its sample, which may have more rows, int64 [rows]."""
    begins, trained = begins_of_samples(samples), batches.trained_tokens(samples)
    counts = np.add.reduceat(trained, begins)
    return pa.array(np.repeat(counts, np.diff(begins, append=samples.num_rows)))


def forward_parts(
    samples: pa.Table, config: TrainerConfig, num_ranks: int, role: Role = Role.POLICY, *, pads_rows: bool = False
) -> tuple[list[Message], np.ndarray]:
    """Returns each rank's samples for `Worker.forward`, and the order that restores the rows of `samples`.

    Row i of `samples` is row order[i] of the concatenated answers.
    """
    narrow = samples.select(_columns(samples, config, role))
    parts: list[Message] = []
    order: list[int] = []
    for microbatches in _assign(samples, config, num_ranks, pads_rows=pads_rows):
        rows = [index for microbatch in microbatches for index in microbatch]
        frames = list(batches.encode(narrow.take(pa.array(rows))))
        parts.append(Message({"microbatches": [len(microbatch) for microbatch in microbatches]}, frames))
        order += rows
    return parts, np.argsort(order)


def _columns(samples: pa.Table, config: TrainerConfig, role: Role) -> list[str]:
    """Returns the columns that the ranks need: routed experts only for the policy, since other models choose
    themselves."""
    replays = role is Role.POLICY and config.uses_router_replay and not samples["routed_experts"].null_count
    is_cut = role is not Role.CRITIC and not samples["sampling_mask"].null_count
    return [*_COLUMNS, *["routed_experts"] * replays, *["sampling_mask"] * is_cut]


def _needed(config: TrainerConfig, role: Role) -> tuple[str, ...]:
    if role is Role.CRITIC:
        return ("values", "returns")
    advantages = () if config.loss.kind == "sft" else ("advantages",)
    routed_experts = ("routed_experts",) if config.moe.router_replay == "on" else ()
    teacher = ("teacher_top_k",) if config.loss.distill.coef else ()
    return (*advantages, *(("ref_logprobs",) if config.loss.kl_coef else ()), *routed_experts, *teacher)


def _assign(samples: pa.Table, config: TrainerConfig, num_ranks: int, *, pads_rows: bool) -> list[list[list[int]]]:
    return assign(
        batches.packed_lengths(samples).tolist(),
        num_ranks=num_ranks,
        max_tokens=config.max_tokens_per_microbatch,
        multiple_of=microbatches_multiple(config),
        pads_rows=pads_rows,
    )
