"""Offloads tensors that the current phase does not need to host memory, and restores them bit for bit."""

import itertools
from collections.abc import Callable, Iterable, Mapping

import torch

from services.trainer.compat.torch import storage_id


class Offloader:
    """Offloads and restores groups of tensors; only the groups in `leaving` are ever offloaded.

    It works on storages, so that tensors which share memory (views, flat buffers) still share it afterwards. A storage
    in several groups, such as the weights of a float32 model, moves with the first of them, which must be loaded
    whenever the others are used. Groups in `discarded` come back as zeros.
    """

    def __init__(
        self,
        groups: Mapping[str, Callable[[], Iterable[torch.Tensor]]],
        leaving: frozenset[str],
        discarded: frozenset[str] = frozenset({"grads"}),
    ):
        self._groups, self._leaving, self._discarded = groups, leaving, discarded
        self._away: dict[str, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]] = {}

    def load(self, *names: str) -> None:
        """Restores groups to the device; groups that are not offloaded stay as they are."""
        for name in names:
            for storage, num_bytes, host in self._away.pop(name, ()):
                storage.resize_(num_bytes)
                device = _as_bytes(storage)
                device.zero_() if host is None else device.copy_(host)

    def release(self, *names: str) -> None:
        """Offloads groups that are in `leaving`."""
        for name in names:
            if name in self._leaving and name not in self._away:
                self._away[name] = [self._send(storage, name) for storage in self._storages(name)]

    def _send(self, storage: torch.UntypedStorage, name: str) -> tuple[torch.UntypedStorage, int, torch.Tensor | None]:
        host, num_bytes = None, storage.nbytes()
        if name not in self._discarded:
            host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            host.copy_(_as_bytes(storage))
        storage.resize_(0)
        return storage, num_bytes, host

    def _storages(self, name: str) -> Iterable[torch.UntypedStorage]:
        """Returns each storage of a group once, without those that an earlier group contains."""
        found = {storage_id(tensor): tensor.untyped_storage() for tensor in self._groups[name]()}
        for earlier in itertools.takewhile(lambda other: other != name, self._groups):
            for tensor in self._groups[earlier]():
                found.pop(storage_id(tensor), None)
        return [storage for storage in found.values() if storage.nbytes()]


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
