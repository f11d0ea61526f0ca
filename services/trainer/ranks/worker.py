"""Implements the commands of a trainer rank. `Ranks` on rank 0 calls each command on all ranks at once."""

import gc
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import torch
import torch.distributed as dist
from lockstep.types.v1 import types_pb2

from services.common import batches
from services.common.config.load import parse_json
from services.common.config.trainer import CriticSettings, TrainerConfig
from services.common.errors import LockstepError, PreconditionFailed, Reason
from services.common.files import writing
from services.common.json_values import JsonObject
from services.common.model_card import read_model_card, write_model_card
from services.common.routed_experts import RoutedExpertsShape, routed_experts_shape
from services.common.rpc.progress import PROGRESS
from services.common.weights.buckets import Items, Sums
from services.common.weights.plan import Plan
from services.trainer.backend import Backend, Role
from services.trainer.checkpoint import manifest as checkpoint
from services.trainer.checkpoint import model_files
from services.trainer.checkpoint.ranks import in_background
from services.trainer.losses.kinds import Totals, require_importable
from services.trainer.ranks.calls import Message, rank_command
from services.trainer.ranks.memory import MemoryCommands, reserve_workspaces, return_free_memory
from services.trainer.ranks.publish import SendingMember, join_epoch, send
from services.trainer.updates.batch import BatchUpdate, CriticUpdate
from services.trainer.updates.packing import Microbatch, build_microbatch
from services.trainer.updates.profiler import Profiler
from services.trainer.updates.softmax import TopK


class Worker(MemoryCommands):
    """One rank's backend of each role and, if the rank sends weights, its membership in the weight group."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, device: torch.device):
        self._store, self._rank, self._world_size = store, rank, world_size
        self._device = device
        self._num_groups = 0
        self._configs: dict[Role, TrainerConfig] = {}
        self._backends: dict[Role, Backend] = {}
        self._plan: Plan | None = None
        self._members = [0]  # the ranks that send weights, in the order of their ranks in the weight group
        self._base_sums: Sums | None = None  # hash sums of the frozen base, once it was sent
        self._group: SendingMember | None = None
        self._model_path = ""
        self._routed_experts: RoutedExpertsShape | None = None  # of the policy's model
        self._profiler: Profiler | None = None
        self._saving: futures.Future[JsonObject] | None = None
        self._num_updates = 0
        self._updates: dict[Role, BatchUpdate] = {}  # those whose blocks are arriving
        self._profiled = ExitStack()  # closed when that of the policy ends

    @rank_command
    def open(
        self, *, role: str, config_json: str, model_path: str, checkpoint_path: str, seed: int, bucket_bytes: int
    ) -> Message:
        """Builds a role's backend from the model directory, or from a checkpoint that rank 0 has verified.

        Opening the policy closes every role that is open, so the policy must be opened before the other roles.

        Raises:
            InvalidInput: The config is invalid, or the policy's loss cannot be imported.
        """
        role = Role(role)
        config = parse_json(role.config, config_json)
        if role is Role.POLICY:
            require_importable(config.loss)
        self._close_role(role)
        if not dist.is_initialized():
            self._start_process_group(timedelta(seconds=config.collective_timeout_s))
        reserve_workspaces(self._device)
        self._configs[role] = config
        with self._backends[Role.POLICY].keep_generators() if Role.POLICY in self._backends else nullcontext():
            torch.manual_seed(seed)
            backend = self._load(role, model_path, checkpoint_path)
        return_free_memory(self._device)  # of loading; what a step takes first would stay in the middle of it
        frames = []
        if role is Role.POLICY:
            self._model_path = model_path
            self._routed_experts = routed_experts_shape((Path(model_path) / "config.json").read_bytes())
            self._profiler, self._num_updates = Profiler(config.profiler, self._rank), 0
            self._plan, self._base_sums = self._make_plan(bucket_bytes), None
            frames = [self._plan.message.SerializeToString()] if self._rank == 0 else []
        return Message({"data_rank": backend.data_rank, "pads_rows": backend.pads_rows}, frames)

    def _load(self, role: Role, model_path: str, checkpoint_path: str) -> Backend:
        with PROGRESS.stage(f"load the {role} model"):
            backend = self._backends[role] = _make_backend(role, self._configs[role], model_path, self._device)
        if checkpoint_path:
            try:
                with PROGRESS.stage("read the checkpoint"):
                    backend.load(Path(checkpoint_path) / "state")
            except BaseException:
                # No variable may keep the model alive while its memory is freed.
                del backend
                self._close_role(role)
                raise
        return backend

    @rank_command
    def close(self) -> None:
        """Closes all roles and frees their models. Leaves the weight group and the process group."""
        self.leave()
        for role in list(self._updates):
            self.drop_batch(role=role)
        self._end_of_save()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        while self._backends:  # popped without a variable, which would keep the model alive
            self._backends.popitem()[1].close()
        self._plan = None
        self._free()
        if dist.is_initialized():
            dist.destroy_process_group()

    @rank_command
    def forward(
        self,
        *,
        role: str,
        microbatches: list[int],
        temperature: float,
        top_k: Sequence[int] = (),
        frames: Sequence[bytes],
    ) -> Message:
        """Returns log-probabilities and entropy, or a critic's values, of this rank's samples in their order.

        With `top_k`, also the most probable tokens of each place with their log-probabilities.
        """
        wanted = TopK(*top_k)
        scored = [replace(one, top_k=wanted) for one in self._microbatches(batches.decode(frames), microbatches)]
        # For a reference that is not open it is the base of a policy with adapters.
        is_base = role == Role.REFERENCE and role not in self._backends and self._configs[Role.POLICY].lora.rank
        forward = self._open().forward_base if is_base else self._open(Role(role)).forward
        outputs = forward(scored, temperature)
        columns: dict[str, pa.Array] = {}
        for index, name in enumerate(("values",) if role == Role.CRITIC else ("logprobs", "entropy")):
            rows = [one.per_sample(out[index]) for one, out in zip(scored, outputs, strict=True)]
            columns[name] = pa.array(itertools.chain(*rows), pa.list_(pa.float32()))
        if wanted.k:
            columns["top_k"] = pa.array(
                itertools.chain(*(one.encoded_top_k(out) for one, out in zip(scored, outputs, strict=True))),
                pa.large_binary(),
            )
        return Message({}, list(batches.encode(pa.table(columns))))

    @rank_command
    def begin_batch(self, *, role: str, temperature: float, is_one_block: bool) -> None:
        """Begins an update of a role whose blocks `add_block` gets; drops one that was begun before."""
        self.drop_batch(role=role)
        role = Role(role)
        backend, config = self._open(role), self._configs[role]
        if isinstance(config, CriticSettings):
            self._updates[role] = CriticUpdate(backend, config)
            return
        self._updates[role] = BatchUpdate(backend, config, temperature, is_one_block=is_one_block)
        assert self._profiler is not None, "open creates the profiler with the policy"
        self._profiled.enter_context(self._profiler.update(self._num_updates))

    @rank_command
    def add_block(self, *, role: str, minibatches: list[tuple[int, list[int]]], frames: Sequence[bytes]) -> None:
        """Takes this rank's samples of a block; `minibatches` has numbers of mini-batches and the sizes of
        micro-batches."""
        samples, begin = batches.decode(frames), 0
        with self._profiled.pop_all() as profiled:  # an error ends the profile
            for number, sizes in minibatches:
                microbatches = self._microbatches(samples.slice(begin, sum(sizes)), sizes)
                self._updates[Role(role)].add(microbatches, number)
                begin += sum(sizes)
            self._profiled = profiled.pop_all()

    @rank_command
    def apply_batch(self, *, role: str, totals: list[dict[str, int]], version: int) -> Message:
        """Updates a role, which is at `version`, on the mini-batches of all blocks, which have `totals`."""
        role = Role(role)
        with self._profiled.pop_all() if role is Role.POLICY else nullcontext():
            metrics = self._updates[role].apply([Totals(**minibatch) for minibatch in totals], version)
        del self._updates[role]  # of an update that fails, drop_batch frees the gradients
        self._num_updates += role is Role.POLICY
        self._synchronize()
        return Message({"metrics": metrics})

    @rank_command
    def drop_batch(self, *, role: str) -> None:
        """Discards the gradients of the update whose blocks were arriving, if there is one."""
        if role == Role.POLICY:
            self._profiled.close()
        if update := self._updates.pop(Role(role), None):
            update.drop()

    @rank_command
    def join(self, *, group: str) -> Message:
        """Joins the epoch if this rank is a member. The senders, with rank 0, are the group's first members."""
        self.leave()
        message = types_pb2.WeightGroup.FromString(bytes.fromhex(group))
        self._group = join_epoch(message, rank=self._rank, senders=self._members, device=self._device)
        return Message({"plan_digest": self._open_plan().digest})

    @rank_command
    def agree(self) -> Message:
        """Decides, before adapters are published, whether `send` skips the base because all members already hold it."""
        if self._rank != 0:
            return Message({})
        if self._group is None:
            raise PreconditionFailed("the epoch was not joined", reason=Reason.NOT_JOINED)
        agrees = self._group.agrees(self._base_sums or (0, 0))
        return Message({"skips_base": agrees and self._base_sums is not None})

    @rank_command
    def send(self, *, version: int, skips_base: bool) -> Message:
        """Publishes the weights. All ranks gather them, and the senders broadcast them.

        If the broadcast fails, every rank still finishes the gather, because it is a collective.
        """
        plan, base_sums = self._open_plan(), self._base_sums if skips_base else None
        weights = self._published(plan, skips_base=skips_base)
        with torch.no_grad():
            try:
                if self._group is None and self._rank not in self._members:
                    return Message({})
                if self._group is None:
                    raise PreconditionFailed("the epoch was not joined", reason=Reason.NOT_JOINED)
                publication = send(self._group, plan, weights, version=version, base_sums=base_sums)
            except BaseException:
                self.kill_epoch()  # so that no member waits for this rank's part
                raise
            finally:
                _exhaust(weights)
        self._base_sums = publication.base_sums
        return Message(asdict(publication))

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def kill_epoch(self) -> None:
        """Makes all members of the current epoch give up. Other threads may call this."""
        if (group := self._group) is not None:  # once: the thread of `leave` may set it to None
            group.kill()

    @rank_command
    def save(self, *, path: str, state: JsonObject, role: str = Role.POLICY) -> Message:
        """Writes a checkpoint into its staging directory, which must exist. Rank 0 then completes the checkpoint.

        If the backend writes in the background, the answer is empty, and `saved` returns it when all is written.
        """
        self._end_of_save()
        final, backend = Path(path), self._open(Role(role))
        directory = checkpoint.staging(final) / "state"
        if backend.saves_in_background:
            write = backend.begin_save(directory)
            self._saving = in_background(lambda: write() or self._complete(final, state))
            return Message({})
        backend.save(directory)  # returns when all ranks have written
        return Message(self._complete(final, state))

    def saved(self) -> JsonObject:
        """Waits for the background save to end and returns its answer. Other threads may call this.

        Raises:
            LockstepError: The save failed with this error.
        """
        assert self._saving is not None, "saved is called only after save has returned an empty answer"
        return self._saving.result()

    @rank_command
    def export(self, *, path: str, files: Mapping[str, str] | None = None) -> Message:
        """Exports the policy as a Hugging Face model directory to `path`. Rank 0 writes it.

        `files` replace those of the starting model. A policy with adapters is written with the adapters merged, and the
        subdirectory `adapter` gets the adapters alone, with the tokenizer.
        """
        weights, lora = self._open().weights(), self._configs[Role.POLICY].lora
        adapter = self._open().adapter(of_modules=True) if lora.rank else ()
        if self._rank != 0:
            _exhaust(itertools.chain(weights, adapter))
            return Message({})
        final = Path(path)
        try:
            with writing(final):
                partial = checkpoint.staging(final)
                card = model_files.served_card(read_model_card(self._model_path), files or {})
                num_bytes = model_files.export_hugging_face(weights, card, partial)
                if lora.rank:
                    num_bytes += model_files.export_adapter(adapter, lora, self._model_path, partial / "adapter")
                    write_model_card(model_files.tokenizer_card(card), partial / "adapter")
                checkpoint.finish_export(final)
        except LockstepError:
            _exhaust(itertools.chain(weights, adapter))  # the other ranks take part to the end
            raise
        return Message({"num_bytes": num_bytes})

    def _microbatches(self, samples: pa.Table, sizes: Sequence[int]) -> list[Microbatch]:
        begins = itertools.accumulate(sizes, initial=0)
        parts = [samples.slice(begin, size) for begin, size in zip(begins, sizes, strict=False)]
        return [build_microbatch(part, self._routed_experts).to(self._device) for part in parts]

    def _make_plan(self, bucket_bytes: int) -> Plan:
        backend, lora = self._open(), self._configs[Role.POLICY].lora
        base = backend.weight_specs()
        if not lora.published_rank:
            slots = backend.sender_slots(bucket_bytes)
            self._members = sorted({0, *(rank for rank, _ in slots)})
            numbered = [(self._members.index(rank), num_tensors) for rank, num_tensors in slots]
            return Plan.of(base, bucket_bytes=bucket_bytes, slots=numbered)
        self._members = [0]
        adapter = backend.adapter_specs()
        config_json = json.dumps(model_files.adapter_config(lora, self._model_path, [name for name, _ in adapter]))
        return Plan.with_adapter(base, adapter, adapter_config_json=config_json, bucket_bytes=bucket_bytes)

    def _published(self, plan: Plan, *, skips_base: bool) -> Items | Iterator[Items]:
        backend = self._open()
        if plan.num_senders > 1:
            return backend.sent_weights(plan.message.bucket_bytes)
        if not plan.has_adapter:
            return backend.spans()
        return itertools.chain(() if skips_base else backend.base(), backend.adapter())

    def _complete(self, path: Path, state: JsonObject) -> JsonObject:
        if self._rank != 0:
            return {}
        with writing(path):
            num_bytes, digest = checkpoint.finish(path, checkpoint.TrainState(**state))
        return {"num_bytes": num_bytes, "manifest_digest": digest}

    def _end_of_save(self) -> None:
        """Waits until this rank's background save has ended. Ignores its error, which rank 0 has reported."""
        if self._saving is not None:
            futures.wait([self._saving])

    def _open(self, role: Role = Role.POLICY) -> Backend:
        if role not in self._backends:
            raise PreconditionFailed(f"no {role} is open on this trainer; call OpenRun", reason=Reason.RUN_NOT_OPEN)
        return self._backends[role]

    def _open_plan(self) -> Plan:
        self._open()
        assert self._plan is not None, "open creates the plan with the policy"
        return self._plan

    def _close_role(self, role: Role) -> None:
        if role is Role.POLICY:
            self.close()
        elif role in self._backends:
            self._end_of_save()
            self._backends.pop(role).close()
            self._free()

    def _free(self) -> None:
        gc.collect()  # models are in reference cycles with their hooks
        return_free_memory(self._device)

    def _start_process_group(self, timeout: timedelta) -> None:
        self._num_groups += 1
        store = dist.PrefixStore(f"lockstep/{self._num_groups}", self._store)  # which has an earlier group's keys still
        # With GPUs gloo too: ranks tell each other JSON in host memory (checkpoint/ranks.py).
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._world_size, timeout=timeout)


def _exhaust(weights: Iterable[object]) -> None:
    for _ in weights:
        pass


def _make_backend(role: Role, config: TrainerConfig, model_path: str, device: torch.device) -> Backend:
    """Imports and builds the backend. A host may have only one backend's libraries, and they are slow to import."""
    is_new = f"services.trainer.{config.strategy}.backend" not in sys.modules
    if config.strategy == "megatron":
        with PROGRESS.stage("import Megatron"):
            from services.trainer.megatron.backend import MegatronBackend as Kind
    else:
        with PROGRESS.stage("import FSDP"):
            from services.trainer.fsdp.backend import FsdpBackend as Kind
    if is_new and role is Role.POLICY:  # which opens first: no model is frozen with the modules
        gc.freeze()  # or each collection would search what was imported, for 0.1 s
    return Kind(role, config, model_path, device)
