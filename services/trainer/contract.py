"""Enforces what a call must hold: its role is open with the parts that it needs, and stamps of header and samples are
those of the weights that are trained (the on-policy contract)."""

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from google.protobuf.json_format import MessageToDict
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.types.v1 import types_pb2
from lockstep.types.v1.types_pb2 import DeviceMemory, ModelCard

from services.common.config.rollout import MIN_TEMPERATURE
from services.common.config.trainer import TrainerConfig, tensor_settings
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.model_card import model_digests, vocab_size_of
from services.common.routed_experts import RoutedExpertsShape, routed_experts_shape
from services.common.weights.plan import require_stamp
from services.trainer.backend import Part, Role
from services.trainer.checkpoint.manifest import TrainState
from services.trainer.checkpoint.model_files import sampled_sha256
from services.trainer.ranks.calls import Ranks
from services.trainer.ranks.worker import Worker
from services.trainer.samples import check_groups, check_samples
from services.trainer.updates.softmax import TopK

log = logging.getLogger(__name__)

MAX_SKIPPED = 5
"""Number of batches in a row of which nothing is applied that ends a run (OptimConfig.on_nonfinite)."""


ROLES: Mapping[int, Role] = {
    pb.ROLE_UNSPECIFIED: Role.POLICY,
    pb.ROLE_POLICY: Role.POLICY,
    pb.ROLE_REFERENCE: Role.REFERENCE,
    pb.ROLE_CRITIC: Role.CRITIC,
    pb.ROLE_TEACHER: Role.TEACHER,
}


@dataclass
class OpenRole:
    role: Role
    request_sha256: str  # of the config and model path in the OpenRun request
    config: TrainerConfig
    answer: pb.OpenRunResponse
    data_ranks: Sequence[int]  # for each rank, the index of the samples that it gets
    state: TrainState
    digest: str = ""  # of the weights as they were published; empty if they have changed since
    pads_rows: bool = False  # whether a micro-batch is padded to its longest sample
    released: set[Part] = field(default_factory=set)  # the parts that may be in host memory

    @property
    def num_parts(self) -> int:
        return max(self.data_ranks) + 1

    @functools.cached_property
    def vocab_size(self) -> int:
        return vocab_size_of(self.answer.model_card.files["config.json"])

    @functools.cached_property
    def routed_experts(self) -> RoutedExpertsShape | None:
        """The shape of the model's routed experts, if all of its layers have experts."""
        return routed_experts_shape(self.answer.model_card.files["config.json"])

    def check_samples(self, samples: pa.Table) -> None:
        check_samples(samples, vocab_size=self.vocab_size, routed_experts=self.routed_experts)

    @property
    def stamp(self) -> types_pb2.PolicyStamp:
        return types_pb2.PolicyStamp(version=self.state.version, digest=self.digest)

    def require_here(self, *parts: Part) -> None:
        """Checks that parts of the model are on the devices.

        Raises:
            PreconditionFailed: MEMORY_RELEASED, a part is released.
        """
        for part in parts:
            if part in self.released:
                raise PreconditionFailed(
                    f"part {part} of the {self.role} is released; call AcquireMemory", reason=Reason.MEMORY_RELEASED
                )

    def trained(self, header: pb.TrainHeader, metrics: dict[str, float], sha256: str) -> None:
        """Takes note of a batch that was applied; `sha256` is that of its samples.

        Raises:
            PreconditionFailed: NONFINITE_GRADIENT, all updates of this batch and of those before it were skipped. It
                does not count as applied.
        """
        in_a_row, num_updates = 0, self.config.num_epochs * self.config.num_minibatches
        if skipped := metrics.get("skipped", metrics.get("critic_skipped", 0)):
            log.warning("batch %s: %g of %d updates skipped: not finite", header.batch_id, skipped, num_updates)
        if skipped == num_updates:
            in_a_row = self.state.skipped_in_a_row + 1
        if in_a_row == MAX_SKIPPED:
            raise PreconditionFailed(
                f"the gradients of {MAX_SKIPPED} batches in a row are not finite, the last of batch {header.batch_id}; "
                "nothing of them was applied; look at the samples of these steps, or go back with resume= and an "
                "earlier checkpoint, for a lower optim.lr in a run of another name",
                reason=Reason.NONFINITE_GRADIENT,
            )
        version, digests, values = self.state.version + 1, self.state.digests, header_values(header)
        made_with = self.state.made_with
        self.state = TrainState(version, header.batch_id, metrics, digests, sha256, values, in_a_row, made_with)
        self.digest = ""

    def published(self, digest: str) -> None:
        """Takes note of a publication, and forgets the ones that no batch may be sampled from any longer."""
        self.digest, version = digest, self.state.version
        digests = {**self.state.digests, str(version): digest}
        oldest = version - self.config.lag.versions
        recent = {number: digests[number] for number in sorted(digests, key=int) if oldest <= int(number) <= version}
        self.state = replace(self.state, digests=recent)


def role_of(number: int, *, is_trained: bool = False) -> Role:
    role = ROLES.get(number)
    if role is None or (is_trained and role.is_frozen):
        known = "policy or critic" if is_trained else "policy, reference, critic or teacher"
        raise InvalidInput(f"role: must be {known}", field="role")
    return role


def made_with(config: TrainerConfig, model_path: Path, card: ModelCard) -> dict[str, Any]:
    """Returns what must be equal for a checkpoint's tensors to be the same model (TrainState.made_with)."""
    weights = {"model": sampled_sha256(model_path)} if config.lora.rank else {}
    return tensor_settings(config) | weights | model_digests(card)


def check_contract(header: pb.TrainHeader, samples: pa.Table, opened: OpenRole) -> None:
    """Checks that the batch carries exactly the policy's held stamp, and every sample too (docs/design.md, On-policy).

    With `trainer.lag`, the samples must carry the stamp of exactly the earlier publication that the header names.

    A critic is trained on samples of the policy that it judges: they must carry the stamp in the header, and the header
    must name the version that the critic holds. With loss kind sft only the policy's version is checked.

    Raises:
        InvalidInput: A column is missing or invalid.
        PreconditionFailed: A stamp or a version is not the one that is opened.
    """
    opened.check_samples(samples)
    check_groups(samples)
    if opened.role is Role.POLICY and opened.config.loss.kind == "sft":
        # The samples come from a data set, not from a policy.
        require_version(header.expected_stamp.version, opened, "the batch is for version {}")
        return
    stamp = header.expected_stamp if opened.role is Role.CRITIC else opened.stamp
    require_stamp(header.expected_stamp, stamp, who="the trainer")
    if opened.role is Role.CRITIC:
        require_version(header.critic_version, opened, "the batch is for version {}")
    drawn = _drawn_stamp(header, opened) if opened.role is Role.POLICY else stamp
    # Each different stamp once: a batch has thousands of samples and usually one stamp.
    stamps = samples.group_by(["policy_version", "policy_digest"], use_threads=False).aggregate([])
    for row in stamps.to_pylist():
        sampled_from = types_pb2.PolicyStamp(version=row["policy_version"], digest=row["policy_digest"])
        require_stamp(sampled_from, drawn, who="a sample was generated by other weights: the trainer")


def _drawn_stamp(header: pb.TrainHeader, opened: OpenRole) -> types_pb2.PolicyStamp:
    """Returns the stamp that the samples must carry: the held one or, with a lag, that of the publication named.

    Raises:
        PreconditionFailed: TOO_STALE, the publication is older than the lag allows; or this trainer did not make it.
    """
    if not header.HasField("drawn_stamp"):
        return opened.stamp
    drawn, lag = header.drawn_stamp, opened.config.lag.versions
    if drawn.version + lag < opened.state.version:
        raise PreconditionFailed(
            f"the samples are of version {drawn.version}, and the trainer holds version {opened.state.version}: "
            f"trainer.lag.versions {lag} allows no older version than {opened.state.version - lag}",
            reason=Reason.TOO_STALE,
        )
    digest = opened.state.digests.get(str(drawn.version), "")
    published = types_pb2.PolicyStamp(version=drawn.version, digest=digest)
    require_stamp(drawn, published, who="among its last publications the trainer")
    return published


def top_k_of(header: pb.ForwardHeader, role: Role, opened: OpenRole) -> TopK:
    """Returns the tokens that a Forward call asks for. Raises InvalidInput if the model has not so many."""
    if header.top_k and role is Role.CRITIC:
        raise InvalidInput("top_k: a critic has no probabilities of tokens", field="top_k")
    vocab_size = min(header.vocab_size or opened.vocab_size, opened.vocab_size)
    if header.top_k > vocab_size:
        raise InvalidInput(f"top_k: must be at most {vocab_size}, the {role}'s number of tokens", field="top_k")
    return TopK(header.top_k, vocab_size)


def header_values(header: pb.TrainHeader) -> dict[str, Any]:
    """Returns by name the values of a header that decide, together with the samples, what is applied.

    The sizes of blocks are left out: they differ between a stream and its repetition as a whole.
    """
    decisive = pb.TrainHeader()
    decisive.CopyFrom(header)
    for name in ("batch_id", "role", "groups_per_minibatch", "tokens_per_block", "block_growth"):
        decisive.ClearField(name)
    return MessageToDict(decisive, preserving_proto_field_name=True)


def require_version(version: int, opened: OpenRole, wish: str) -> None:
    """Checks that the role is at `version`; `wish` tells in an error what it is needed for."""
    if version != opened.state.version:
        raise PreconditionFailed(
            f"{wish.format(version)}, but the trainer holds version {opened.state.version}", reason=Reason.STALE_STAMP
        )


def replay(header: pb.TrainHeader, opened: OpenRole, sha256: str) -> pb.TrainResponse:
    """Returns the answer to a batch that was applied already: the same samples, to the version that the caller expects.

    `sha256` is that of the samples that came with the repeated `header`.

    Raises:
        PreconditionFailed: REPLAYED_BATCH: under this id other samples were applied, or to another version, or with
            another header.
    """
    state = opened.state
    if state.last_batch_sha256 != sha256:
        raise PreconditionFailed(
            f"other samples were applied as batch {header.batch_id}, by a coordinator that had the run in between; "
            "restart the trainer, to resume from a checkpoint",
            reason=Reason.REPLAYED_BATCH,
        )
    applied_to = header.critic_version if opened.role is Role.CRITIC else header.expected_stamp.version
    if applied_to + 1 != state.version:
        raise PreconditionFailed(
            f"batch {header.batch_id} was applied to version {state.version - 1}, not to {applied_to}",
            reason=Reason.REPLAYED_BATCH,
        )
    repeated, applied = header_values(header), state.last_header
    if other := sorted(name for name in {**repeated, **applied} if repeated.get(name) != applied.get(name)):
        name = other[0]
        raise PreconditionFailed(
            f"batch {header.batch_id} was applied with {name} {applied.get(name)}, not {repeated.get(name)}; "
            "a batch of other values needs an id of its own",
            reason=Reason.REPLAYED_BATCH,
        )
    return pb.TrainResponse(
        version=state.version, metrics=state.last_metrics, replayed=True, samples_sha256=bytes.fromhex(sha256)
    )


def check_temperature(temperature: float) -> None:
    # Logits divided by less overflow. The header has a float32, which may be below the float64 of the config.
    if not MIN_TEMPERATURE * (1 - 1e-6) <= temperature < float("inf"):
        raise InvalidInput(
            f"temperature: must be at least {MIN_TEMPERATURE:g} and finite, not {temperature:g}", field="temperature"
        )


_PARTS: Mapping[int, Part] = {pb.MODEL_PART_OPTIMIZER: Part.OPTIMIZER, pb.MODEL_PART_PARAMETERS: Part.PARAMETERS}
Request = pb.ReleaseMemoryRequest | pb.AcquireMemoryRequest


async def release(ranks: Ranks, request: pb.ReleaseMemoryRequest, roles: Mapping[Role, OpenRole]) -> list[DeviceMemory]:
    """Moves parts to host memory on all ranks, unless they can stay. Returns the memory of each rank."""
    named, parts = _roles(request, roles), _requested_parts(request)
    for role in named:  # first: a call that asks from now on would run after this one
        roles[role].released.update(parts)
    least = request.least_free_bytes
    answers = await ranks.call(Worker.release_memory, roles=named, model_parts=parts, least_free_bytes=least)
    return [DeviceMemory.FromString(answer.frames[0]) for answer in answers]


async def acquire(ranks: Ranks, request: pb.AcquireMemoryRequest, roles: Mapping[Role, OpenRole]) -> list[DeviceMemory]:
    """Moves parts back to the devices on all ranks. Returns the memory of each rank.

    Raises:
        Overloaded: OUT_OF_MEMORY, a device has too little; other ranks may have moved theirs. All parts still count as
            released, and both calls may be repeated.
    """
    named, parts = _roles(request, roles), _requested_parts(request)
    answers = await ranks.call(Worker.acquire_memory, roles=named, model_parts=parts)
    for role in named:
        roles[role].released.difference_update(parts)
    return [DeviceMemory.FromString(answer.frames[0]) for answer in answers]


def _requested_parts(request: Request) -> Sequence[Part]:
    if not request.parts or not all(part in _PARTS for part in request.parts):
        raise InvalidInput("parts: name optimizer, parameters or both", field="parts")
    return [_PARTS[part] for part in request.parts]


def _roles(request: Request, opened: Collection[Role]) -> Sequence[Role]:
    roles = [role_of(role) for role in request.roles] or list(opened)
    for role in roles:
        if role not in opened:
            raise InvalidInput(f"roles: no {role} is open on this trainer", field="roles")
    return roles
