"""Finds models and files of datasets on the Hugging Face Hub, and keeps them in the Hub's cache on this host."""

import contextlib
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from services.common.config.load import AnyConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput, NotFound, Unavailable

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo

ConfigT = TypeVar("ConfigT", bound=AnyConfig)

# A directory of the Hub's cache.
_SNAPSHOT = re.compile(r".*/models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<revision>\w+)/?")
_MODEL = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*?)(@(?P<revision>[\w.-]+))?")
# As in fsspec, pandas and datasets. A Path has one slash where the URL had two.
_DATASET_FILE = re.compile(r"hf:/{1,2}datasets/(?P<id>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w.-]+))?(/(?P<file>.+))?")
# How files of the training split are named on the Hub: train.parquet, data/train-00000-of-00002.parquet, train/1.jsonl.
_OF_TRAINING = re.compile(r"(^|[/._-])train([/._-])")
# The files of a model card, and weights. Other files of a repository are often the same weights in another format.
_CARD = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model")
_WEIGHTS = ("model*.safetensors",)


def with_local_models(config: ConfigT, *, has_weights: bool = True) -> ConfigT:
    """Returns `config` with directories on this host in place of models on the Hub (OWNER/NAME or OWNER/NAME@REVISION).

    They are downloaded unless the cache has them; without `has_weights`, only their small files. A model that is a path
    on this host stays as it is.

    Raises:
        NotFound: The Hub has no such model, or you may not see it.
        Unavailable: The Hub is unreachable, and the model was not downloaded before.
    """
    changes: dict[str, object] = {"model": local_model(config.model, has_weights=has_weights, field="model")}
    for role, section in (config.role_sections if isinstance(config, Config) else {}).items():
        if section.model is not None:
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
    with hub_errors(f"{parts['id']}, which is not a directory here,", parts["revision"], field):
        return huggingface_hub.snapshot_download(parts["id"], revision=parts["revision"], allow_patterns=patterns)


def hub_name(directory: str) -> str:
    """Returns OWNER/NAME@REVISION of a directory of the Hub's cache, on any host; another path as it is."""
    parts = _SNAPSHOT.fullmatch(directory)
    return f"{parts['owner']}/{parts['name']}@{parts['revision']}" if parts else directory


def dataset_file(url: str, field: str) -> Path:
    """Returns a dataset's file in the Hub's cache on this host; downloads it if the Hub has another version.

    Raises:
        InvalidInput: `url` is not hf://datasets/OWNER/NAME[@REVISION]/FILE.
        NotFound: The Hub has no such file, or you may not see it.
        Unavailable: The Hub is unreachable, and the file was not downloaded before.
    """
    import huggingface_hub  # slow, and few runs need it

    dataset, revision, file = _split_url(url, field)
    if not file:
        raise InvalidInput(f"{field}: {url} names no file: add one, as in {url}/FILE", field=field)
    name = f"file {file} of dataset {dataset}"
    with hub_errors(name, revision, field):
        cached = huggingface_hub.try_to_load_from_cache(dataset, file, repo_type="dataset", revision=revision)
        if not isinstance(cached, str):  # without a network, a download would be tried for half a minute
            _info(dataset, revision, f"{field}: {name} was not downloaded to this host before, and", field)
        return Path(huggingface_hub.hf_hub_download(dataset, file, repo_type="dataset", revision=revision))


def dataset_files(url: str, field: str, *, suffixes: tuple[str, ...]) -> list[str]:
    """Returns the URLs of the files that `url` names, sorted, all of one revision.

    A FILE may be a pattern, in which * is any text without a slash. Without a FILE, data.train is the files of the
    dataset's training split, if it has one such split. If it is there in several forms, the first of `suffixes` counts.

    Raises:
        InvalidInput: `url` has another form, or it is not clear which files it names. The message lists what there is.
        NotFound: The Hub has no such dataset, or you may not see it.
        Unavailable: The Hub is unreachable, which alone knows all files.
    """
    dataset, revision, wanted = _split_url(url, field)
    if wanted and "*" not in wanted:
        return [url]
    with hub_errors(f"dataset {dataset}", revision, field):
        repository = _info(dataset, revision, f"{field}: the files of dataset {dataset} are not known, because", field)
    names = sorted(file.rfilename for file in repository.siblings or () if file.rfilename.endswith(suffixes))
    if wanted:
        pattern = re.compile(re.escape(wanted).replace(r"\*", "[^/]*"))
        chosen = [name for name in names if pattern.fullmatch(name)]
    else:
        training = [name for name in names if _OF_TRAINING.search(name)] if field == "data.train" else []
        forms = ([name for name in training if name.endswith(suffix)] for suffix in suffixes)
        chosen = next(filter(None, forms), [])
        chosen = chosen if len({name.rpartition("/")[0] for name in chosen}) == 1 else []
    if not chosen:
        has = f"{', '.join(names[:10])}{', ...' if len(names) > 10 else ''}" if names else f"no {' or '.join(suffixes)}"
        example = f"hf://datasets/{dataset}/{names[0] if names else 'FILE'}"
        message = f"{field}: {url} does not say which files to read: name them, as in {example} (* is any text)"
        raise InvalidInput(f"{message}; it has {has}", field=field)
    return [f"hf://datasets/{dataset}@{repository.sha}/{name}" for name in chosen]


def _info(dataset: str, revision: str | None, otherwise: str, field: str) -> "DatasetInfo":
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return huggingface_hub.HfApi().dataset_info(dataset, revision=revision)
    except HfHubHTTPError:
        raise
    except Exception as error:  # of the HTTP library, which differs between versions of the Hub's client
        message = f"{otherwise} the Hugging Face Hub is unreachable ({first_line(error)})"
        raise Unavailable(f"{message}: use a local copy", field=field) from error


def _split_url(url: str, field: str) -> tuple[str, str | None, str | None]:
    parts = _DATASET_FILE.fullmatch(url)
    if not parts:
        raise InvalidInput(f"{field}: {url} is not hf://datasets/OWNER/NAME[@REVISION]/FILE", field=field)
    return parts["id"], parts["revision"], parts["file"]


@contextlib.contextmanager
def hub_errors(name: str, revision: str | None, field: str) -> Iterator[None]:
    """Raises NotFound or Unavailable, with `name` as what is read, if the Hub's client fails in the block."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalEntryNotFoundError as error:
        message = f"{field}: {name} was not downloaded to this host before, and the Hugging Face Hub is unreachable"
        raise Unavailable(f"{message} ({first_line(error)}): use a local copy", field=field) from error
    except (errors.EntryNotFoundError, errors.HfHubHTTPError) as error:
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else HTTPStatus.NOT_FOUND
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            message = f"{field}: {name} cannot be read from the Hugging Face Hub ({first_line(error)})"
            raise Unavailable(f"{message}: try again later, or use a local copy", field=field) from error
        at = f" at revision {revision}" if revision else ""
        message = f"{field}: you cannot see {name}{at} on the Hugging Face Hub ({first_line(error)})"
        raise NotFound(message, field=field) from error


def first_line(error: Exception) -> str:
    """Returns the first line of a message, or the class of an error without one."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
