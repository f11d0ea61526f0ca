"""Reads and writes model cards: the small files of a model, without weights, that an engine and a tokenizer need.

The trainer reads them from its model directory, so rollout and coordinator need neither a copy of the model nor access
to the Hugging Face hub.
"""

import hashlib
import json
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from lockstep.types.v1.types_pb2 import ModelCard

from services.common.errors import InvalidInput, NotFound
from services.common.files import is_there, parse_object, read_regular
from services.common.json_values import JsonObject

_REQUIRED = "config.json"
_OPTIONAL = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    # vLLM reads these of models that also see or hear, although samples are text.
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# What transformers converts where there is no tokenizer.json. These are not text.
_CONVERTED = ("tokenizer.model", "tiktoken.model")
_VOCABULARY = ("tokenizer.json", *_CONVERTED, "vocab.json")
_IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "id2label")
# Files whose key `auto_map` makes transformers import Python code.
_NAMES_CODE = (_REQUIRED, "tokenizer_config.json")


def read_model_card(model_path: str | Path) -> ModelCard:
    """Returns the card of a model directory.

    Raises:
        NotFound: The directory does not exist or has no config.json.
        InvalidInput: A file is not a regular file, links to a file outside the model, is not a JSON object though its
            name ends in .json, is not text, or asks to run code that comes with the model (`auto_map`), which is never
            run.
    """
    directory = Path(model_path)
    try:
        is_directory = directory.is_dir()
    except OSError as error:  # its name is too long, or what it is in may not be read
        raise InvalidInput(f"model: {directory} cannot be read: {error.strerror}", field="model") from error
    if not is_directory:
        here = "" if directory.is_absolute() else f" in {Path.cwd()} on {socket.gethostname()}"
        raise NotFound(f"model: directory {directory} does not exist{here}", field="model")
    names = [name for name in (_REQUIRED, *_OPTIONAL, *_CONVERTED) if is_there(directory / name)]
    if "tokenizer.json" in names:
        names = [name for name in names if name not in _CONVERTED]
    if _REQUIRED not in names:
        is_checkpoint = (directory / "manifest.json").is_file()
        hint = ": it is a checkpoint, of which `lockstep export` makes a model" if is_checkpoint else ""
        raise NotFound(f"model: {directory} has no {_REQUIRED}{hint}", field="model")
    for name in names:
        _refuse_outside(directory / name)
    card = ModelCard(files={name: read_regular(directory / name) for name in names})
    _refuse_code(card, directory)
    return card


def card_texts(card: ModelCard) -> dict[str, str]:
    """Returns the texts of a card's files by name.

    Raises:
        InvalidInput: The card has an unexpected file, or asks to run code that comes with the model.
    """
    _check_files(card, Path("model_card"), (_REQUIRED, *_OPTIONAL))
    return {name: content.decode() for name, content in card.files.items()}


def model_digests(card: ModelCard) -> dict[str, str]:
    """Returns digests of what config.json says of the computation, and of the text that each token stands for, by the
    name of the file. How a release of a library writes the same does not count.

    Raises:
        InvalidInput: A file has a value that no model has.
    """
    names = [_REQUIRED, *[name for name in _VOCABULARY if name in card.files][:1]]
    return {f"model/{name}": hashlib.sha256(_meaning(name, card.files[name])).hexdigest()[:12] for name in names}


def _meaning(name: str, content: bytes) -> bytes:
    if name == _REQUIRED:
        return json.dumps(_counted(full_config(parse_object(content, Path(name)), name)), sort_keys=True).encode()
    try:
        if name == "tokenizer.json":
            tokenizer = json.loads(content)
            added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
            return json.dumps([tokenizer.get("model", {}).get("vocab"), added], sort_keys=True).encode()
    except Exception as error:
        raise InvalidInput(f"model: {name}: {error!r}", field="model") from error
    return content


def full_config(content: JsonObject, source: str) -> JsonObject:
    """Returns a config.json with the defaults of transformers, if it knows the model; errors name `source`.

    Raises:
        InvalidInput: It has a value that no model has.
    """
    from transformers import CONFIG_MAPPING

    try:
        is_known = content.get("model_type") in CONFIG_MAPPING
        return json.loads(_with_defaults(content).to_json_string(use_diff=False)) if is_known else content
    except Exception as error:  # its classes of configs refuse values by many kinds of errors
        raise InvalidInput(f"model: {source}: {error!r}", field="model") from error


def _counted(value: Any) -> Any:
    if isinstance(value, dict):
        kept = cast(JsonObject, value).items()
        return {key: _counted(part) for key, part in kept if key not in _IGNORED and not key.endswith("_token_id")}
    return [_counted(part) for part in cast(list[Any], value)] if isinstance(value, list) else value


def vocab_size_of(config_json: bytes) -> int:
    """Returns the number of rows of the output layer, which may be more than the tokenizer has tokens."""
    content = json.loads(config_json)
    if given := content.get("vocab_size") or content.get("text_config", {}).get("vocab_size"):
        return int(given)
    return int(_with_defaults(content).get_text_config().vocab_size)


def _with_defaults(content: JsonObject) -> Any:
    """Returns transformers' config, with the defaults of keys that are left out, as in Gemma 3's text_config."""
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[content["model_type"]]
    # A number that is not finite, such as Falcon-H1's time_step_limit, is written as {"__float__": "Infinity"}.
    return config_class.from_dict(json.loads(json.dumps(content), object_hook=_number_or_object))


def _number_or_object(content: JsonObject) -> JsonObject | float:
    return float(str(content["__float__"])) if content.keys() == {"__float__"} else content


def write_model_card(card: ModelCard, directory: Path) -> None:
    """Writes the card's files into `directory`.

    Raises:
        InvalidInput: See `card_texts`.
    """
    _check_files(card, directory, (_REQUIRED, *_OPTIONAL, *_CONVERTED))
    for name, content in card.files.items():
        (directory / name).write_bytes(content)


def _check_files(card: ModelCard, directory: Path, expected: Collection[str]) -> None:
    if unexpected := sorted(set(card.files) - set(expected)):
        raise InvalidInput(f"model_card: unexpected file {unexpected[0]!r}", field="model_card")
    _refuse_code(card, directory)


def _refuse_outside(file: Path) -> None:
    """Refuses a link to a file outside the model, because the content of the card's files leaves this host.

    A snapshot in the cache of the Hugging Face hub links to files of its repository, `../../blobs/<hash>`.
    """
    directory = file.parent.resolve()
    blobs = [directory.parents[1] / "blobs"] if directory.parent.name == "snapshots" else []
    target = file.resolve()
    if not any(target.is_relative_to(root) for root in (directory, *blobs)):
        raise InvalidInput(f"model: {file} links to {target}, outside the model; replace it by a copy", field="model")


def _refuse_code(card: ModelCard, source: Path) -> None:
    for name, content in card.files.items():
        if name in _CONVERTED:
            continue
        if not name.endswith(".json"):
            try:
                content.decode()
            except UnicodeDecodeError as error:
                raise InvalidInput(f"model: {source / name} is not UTF-8 text: {error}", field="model") from error
        elif "auto_map" in parse_object(content, source / name) and name in _NAMES_CODE:
            raise InvalidInput(
                f"model: {source / name} has auto_map, which asks to run Python code that comes with the model. "
                "Lockstep never runs such code: use a model that transformers supports by itself and remove auto_map",
                field="model",
            )


INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_ADAPTER = "adapter_config.json"
# A file begins with the length of its header, which is JSON; the format's readers refuse a longer one.
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100_000_000
# How safetensors names the dtypes of weights. Others are quantized, and their scales would be ignored.
_FLOATS = ("F64", "F32", "F16", "BF16")


def _read_weight_map(directory: Path) -> dict[str, str]:
    """Returns the file of each tensor that the index names; empty if all weights are in model.safetensors.

    Raises:
        InvalidInput: There is no safetensors file (pickled weights, `pytorch_model.bin`, are not read), the index names
            no file of the directory, or other programs could read other weights from it.
    """
    has_index, has_whole = (is_there(directory / name) for name in (INDEX, WHOLE))
    if not has_index and not has_whole:
        raise InvalidInput(f"model: {directory} has no {WHOLE}", field="model")
    shards = _read_index(directory / INDEX) if has_index else {}
    if has_whole and set(shards.values()) - {WHOLE}:
        raise InvalidInput(  # transformers reads the one, programs that know only the index the others
            f"model: {directory} has both {WHOLE} and {INDEX}, which names other files; remove one of them",
            field="model",
        )
    if is_there(directory / _ADAPTER):
        raise InvalidInput(  # where PEFT is installed, transformers adds the adapter to the weights
            f"model: {directory} has {_ADAPTER}: merge the adapter into the weights, or remove it", field="model"
        )
    return shards


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. `dtype` is safetensors' name, such as BF16."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def whole_weights(directory: Path) -> dict[str, Stored]:
    """Returns the tensors of a model by name, all of whose files are there and as long as their headers say.

    A directory from which other programs could read other weights is refused.
    """
    shards = _read_weight_map(directory)
    stored: dict[str, Stored] = {}
    for name in sorted(set(shards.values())) or [WHOLE]:
        file = directory / name
        if not is_there(file):
            raise InvalidInput(f"model: {file} does not exist", field="model")
        try:
            header = _read_header(file)
        except ValueError as error:
            raise InvalidInput(f"model: {file} is not a whole safetensors file: {error}", field="model") from error
        for tensor in sorted(stored.keys() & header.keys())[:1]:
            raise InvalidInput(f"model: {tensor} is in two files, {stored[tensor].file} and {name}", field="model")
        stored |= header
    for tensor, shard in shards.items():
        if tensor not in stored or stored[tensor].file != directory / shard:
            raise InvalidInput(f"model: {directory / INDEX}: {tensor} is not in {shard}", field="model")
    return stored


def _read_header(file: Path) -> dict[str, Stored]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            size = os.fstat(opened.fileno()).st_size
            is_cut = length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES)
            header: Mapping[str, Any] = {} if is_cut else parse_object(opened.read(length), file)
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        stored = {name: Stored(file, str(one["dtype"]), tuple(one["shape"])) for name, one in tensors.items()}
        expected = _LENGTH_BYTES + length + max((int(one["data_offsets"][1]) for one in tensors.values()), default=0)
    except (InvalidInput, OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError("its header cannot be read") from error
    if is_cut:
        raise ValueError("its header is cut off" if size else "it is empty")
    if size != expected:
        raise ValueError(f"it has {size} bytes, and its header describes {expected}")
    return stored


def require_shapes(stored: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]], directory: Path) -> None:
    """Checks that a model has the `expected` tensors, of these shapes and of floating point."""
    if missing := [name for name in expected if name not in stored]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise InvalidInput(f"model: {directory} has no tensor {', '.join(missing[:5])}{more}", field="model")
    for name, shape in expected.items():
        tensor, problem = stored[name], ""
        if tensor.shape != tuple(shape):
            problem = f"shape {list(tensor.shape)}, but config.json gives {list(shape)}"
        elif tensor.dtype not in _FLOATS:
            problem = f"dtype {tensor.dtype}; weights must be {', '.join(_FLOATS)}"
        if problem:
            raise InvalidInput(f"model: {tensor.file}: {name} has {problem}", field="model")


def _read_index(index: Path) -> dict[str, str]:
    shards = parse_object(read_regular(index), index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InvalidInput(f"model: {index} has no weight_map", field="model")
    for name in cast(dict[str, object], shards).values():
        if not isinstance(name, str) or name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise InvalidInput(f"model: {index} names {name!r}, which is not a file in its directory", field="model")
    return cast(dict[str, str], shards)
