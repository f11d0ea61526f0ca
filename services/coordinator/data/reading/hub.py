"""Finds models and files of datasets on the Hugging Face Hub, and keeps them in the Hub's cache on this host."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from services.common.config.reading.any import AnyConfig
from services.common.errors import InvalidInput, NotFound, Unavailable

ConfigT = TypeVar("ConfigT", bound=AnyConfig)

_MODEL = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*?)(@(?P<revision>[\w.-]+))?")
# As in fsspec, pandas and datasets. A Path has one slash where the URL had two.
_DATASET_FILE = re.compile(r"hf:/{1,2}datasets/(?P<id>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w.-]+))?/(?P<file>.+)")
# What a model card is made of, and weights. Other files of a repository are often the same weights in another format.
_CARD = ("*.json", "*.jinja", "*.txt")
_WEIGHTS = ("model*.safetensors",)
_ROLES = ("reference", "critic")


def with_local_models(config: ConfigT, *, has_weights: bool = True) -> ConfigT:
    """Returns `config` with directories on this host in place of models on the Hub (OWNER/NAME or OWNER/NAME@REVISION).

    They are downloaded unless the cache has them; without `has_weights`, only their small files. A model that is a path
    on this host stays as it is.

    Raises:
        NotFound: The Hub has no such model, or you may not see it.
        Unavailable: The Hub is unreachable, and the model was not downloaded before.
    """
    changes: dict[str, object] = {"model": local_model(config.model, has_weights=has_weights, field="model")}
    for role in _ROLES:
        section = getattr(config, role, None)
        if section is not None and section.model is not None:
            directory = local_model(section.model, has_weights=has_weights, field=f"{role}.model")
            changes[role] = section.model_copy(update={"model": directory})
    return config.model_copy(update=changes)


def local_model(model: str, *, has_weights: bool, field: str) -> str:
    """Returns the directory of one model; see `with_local_models`."""
    parts = _MODEL.fullmatch(model)
    if not parts or Path(model).exists():
        return model
    import huggingface_hub  # slow, and few runs need it

    patterns = [*_CARD, *_WEIGHTS] if has_weights else [*_CARD]
    with _hub_errors(f"model {parts['id']}, which is no directory here,", parts["revision"], field):
        return huggingface_hub.snapshot_download(parts["id"], revision=parts["revision"], allow_patterns=patterns)


def dataset_file(url: str, field: str) -> Path:
    """Returns a dataset's file in the Hub's cache on this host; downloads it if the Hub has another version.

    Raises:
        InvalidInput: `url` is not hf://datasets/OWNER/NAME[@REVISION]/FILE.
        NotFound: The Hub has no such file, or you may not see it.
        Unavailable: The Hub is unreachable, and the file was not downloaded before.
    """
    import huggingface_hub  # slow, and few runs need it

    parts = _DATASET_FILE.fullmatch(url)
    if not parts:
        raise InvalidInput(f"{field}: {url} is not hf://datasets/OWNER/NAME[@REVISION]/FILE", field=field)
    dataset, file, revision = parts["id"], parts["file"], parts["revision"]
    with _hub_errors(f"file {file} of dataset {dataset}", revision, field):
        return Path(huggingface_hub.hf_hub_download(dataset, file, repo_type="dataset", revision=revision))


@contextlib.contextmanager
def _hub_errors(name: str, revision: str | None, field: str) -> Iterator[None]:
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:
        message = f"{field}: {name} was not downloaded to this host before, and the Hugging Face Hub is unreachable"
        raise Unavailable(f"{message} ({_first_line(error)}): use a local copy", field=field) from error
    except (EntryNotFoundError, HfHubHTTPError) as error:
        at = f" at revision {revision}" if revision else ""
        message = f"{field}: you cannot see {name}{at} on the Hugging Face Hub ({_first_line(error)})"
        raise NotFound(message, field=field) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
