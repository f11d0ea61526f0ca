"""Reads what torch pickles in a distributed checkpoint without running code of the checkpoint's author.

Reason: torch unpickles `.metadata`, and values that are no tensors, whatever they name. A checkpoint may come from
others, and its manifest too. Seen with torch 2.11.0 (CUDA) and 2.13.0 (CPU).
"""

import io
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from services.common.errors import DataLoss

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    # Of Megatron-Core, which some of its releases put there; they have no methods.
    *(("megatron.core.dist_checkpointing.strategies.torch", name) for name in ("MCoreMetadata", "MCoreSavePlan")),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> object:
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if (module_name, global_name) not in _KNOWN and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no checkpoint of torch needs")
        return super().find_class(module_name, global_name)


def read_metadata(directory: Path) -> Metadata:
    """Returns the metadata of a checkpoint.

    Raises:
        DataLoss: It is damaged, or names a class that the metadata of a checkpoint does not have.
    """
    file, why = directory / ".metadata", "it holds something else"
    try:
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 damaged bytes raise any class
        metadata, why = None, f"{error}"
    if not isinstance(metadata, Metadata):
        raise DataLoss(f"{file} is not the metadata of a checkpoint: {why}")
    return metadata


class PlainReader(FileSystemReader):
    """Reads `.metadata` with this list. If torch's own reader fails, torch unpickles `__<rank>.metadata` instead."""

    def read_metadata(self) -> Metadata:
        return read_metadata(Path(self.path))


class PlainPlanner(DefaultLoadPlanner):
    """Loads tensors, and of other values only plain ones."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises an error for others; torch itself reads any
        value.seek(0)
        super().load_bytes(read_item, value)
