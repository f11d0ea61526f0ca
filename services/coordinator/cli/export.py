"""Writes a checkpoint as a Hugging Face model (`lockstep export`), and uploads it to the Hub (`lockstep push`)."""

import json
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.common.config.load import AnyConfig, load_any
from services.common.config.loss import LagConfig, LossConfig
from services.common.config.megatron import MegatronConfig
from services.common.config.run import Config
from services.common.config.trainer import FsdpConfig, ProfilerConfig, TrainerConfig
from services.common.errors import InvalidInput, NotFound, Unavailable
from services.common.families.architecture import read_content
from services.common.families.supported import text_of
from services.coordinator.clients.trainer import Trainer
from services.coordinator.data.reading.hub import first_line
from services.coordinator.fleet.launch import Addresses, launch
from services.coordinator.fleet.running import unless_one_dies
from services.coordinator.runs.ledger import LEDGER
from services.coordinator.runs.resume import CHECKPOINTS, require_own_paths

_LAYOUT = Path("state") / "layout.json"  # only strategy megatron writes it


def export_config(checkpoint: Path, overrides: Sequence[str], dtype: str) -> AnyConfig:
    """Returns the config under which one process on CPU can load `checkpoint`.

    `overrides` come after the config in the run's directory, if it is there. `dtype` is float32, bfloat16, or auto for
    the dtype that the starting model's config.json names.

    Raises:
        NotFound: There is no checkpoint, no config of its run, or no model where that says.
        InvalidInput: The config is invalid.
    """
    if not (checkpoint / "manifest.json").is_file():
        raise NotFound(f"{checkpoint} has no manifest.json; {_instead_of(checkpoint)}", field="checkpoint")
    of_run = checkpoint.resolve().parent.parent / "config.json"
    files = [str(of_run)] if of_run.is_file() else []
    if not files and not overrides:
        raise NotFound(f"{of_run} does not exist: give the config of the run as well", field="checkpoint")
    config = load_any([*files, *overrides])
    for own in files:
        require_own_paths(own, {"model": Path(config.model)}, overrides)
    trainer = _on_one_process(config.trainer, checkpoint)
    trainer = trainer.model_copy(update={"compute_dtype": _dtype(config.model, dtype)})
    changes: dict[str, object] = {"trainer": trainer, "trace": False, "observability": config.observability.quiet()}
    if isinstance(config, Config):
        changes |= {"critic": None, "teacher": None}
    return config.model_copy(update=changes)


def _instead_of(path: Path) -> str:
    folders = path / CHECKPOINTS, path, path.parent  # of a run's directory, its checkpoints, one that was deleted
    if has := sorted(str(saved.parent) for folder in folders for saved in folder.glob("step-*/manifest.json")):
        return f"give one of the run's checkpoints: {', '.join(has)}"
    if (path / LEDGER).is_file():
        return "this run has no checkpoints: checkpoint.save_freq makes them, so set it when you train"
    return "give a checkpoint of a run"


async def export(checkpoint: Path, config: AnyConfig, out: Path) -> None:
    """Starts a trainer on CPU, which loads `checkpoint` and writes the model to `out`.

    Raises:
        LockstepError: The first failure; the checkpoint's files are verified first.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-export-") as directory:
        here = config.model_copy(update={"runs_dir": Path(directory), "name": "export", "resume": "never"})
        launched = launch(here, Addresses(), services=["trainer"], on_cpu=True)
        async with launched as fleet, unless_one_dies(fleet):
            trainer = Trainer(fleet.addresses.trainer, here)
            try:
                await trainer.open("export", str(checkpoint.absolute()))
                await trainer.export(str(out.absolute()))
            finally:
                await trainer.close()


def _on_one_process(trainer: TrainerConfig, checkpoint: Path) -> TrainerConfig:
    """Returns the settings that affect neither the weights nor the layout that the checkpoint needs, at their defaults.

    Checkpoints are loaded in any layout, except those of Megatron that were saved by bucket: they need that layout.
    """
    # Any dispatcher computes the same, and flex needs expert parallelism and a GPU.
    moe = trainer.megatron.moe.model_copy(update={"token_dispatcher_type": "auto"})
    saved, num_ranks = trainer.megatron.model_copy(update={"moe": moe}), 1
    kept = ("moe", "packed_sequences", "dist_checkpointing_path")
    megatron = MegatronConfig().model_copy(update={key: getattr(saved, key) for key in kept})
    layout = checkpoint / _LAYOUT
    if layout.is_file() and json.loads(layout.read_text())["layout"]["resharding"] != "fully_reshardable":
        dense = saved.tensor_model_parallel_size * saved.pipeline_model_parallel_size * saved.context_parallel_size
        expert = saved.pipeline_model_parallel_size * saved.expert_model_parallel_size * saved.etp
        num_ranks, megatron = math.lcm(dense, expert), saved
    alone = {"num_ranks": num_ranks, "megatron": megatron, "fsdp": FsdpConfig()}
    unused = {"loss": LossConfig(), "lag": LagConfig(), "profiler": ProfilerConfig()}
    return trainer.model_copy(update={**alone, **unused})


def _dtype(model: str, dtype: str) -> str:
    if dtype != "auto":
        return dtype
    content = read_content(model)
    # Models that also see or hear may name it only for their text part.
    of_parts = (part.get(key) for part in (content, text_of(content)) for key in ("dtype", "torch_dtype"))
    named = next(filter(None, of_parts), None)
    return "bfloat16" if named == "bfloat16" else "float32"


_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def push(directory: Path, repository: str, *, is_public: bool) -> str:
    """Uploads all files of `directory` in one commit, and returns its URL.

    Makes the repository OWNER/NAME if there is none, public if `is_public`. One that is there stays as it is.

    Raises:
        NotFound: There is no exported model in `directory`.
        InvalidInput: `repository` is not an id, or you may not write there.
        Unavailable: The Hub is unreachable.
    """
    if not _ID.fullmatch(repository):
        raise InvalidInput(f"repository {repository} is not OWNER/NAME", field="repository")
    for pattern in ("config.json", "*.safetensors"):  # a run's directory has only the first, and is not to be uploaded
        if not any(directory.glob(pattern)):
            model = directory / "model"
            instead = f"give {model}" if model.is_dir() else "give runs/NAME/model or an export"
            raise NotFound(f"{directory} has no {pattern}: {instead}", field="directory")
    import huggingface_hub  # slow, and few commands need it
    from huggingface_hub.errors import HfHubHTTPError

    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(repository, private=not is_public, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=directory, commit_message="A model of Lockstep")
    except HfHubHTTPError as error:
        message = f"you cannot write {repository} on the Hugging Face Hub ({first_line(error)}): log in with "
        message += "`hf auth login`, or set HF_TOKEN to a token that may write there"
        raise InvalidInput(message, field="repository") from error
    except Exception as error:  # of the HTTP library, which differs between versions of the Hub's client
        raise Unavailable(f"the Hugging Face Hub is unreachable ({first_line(error)})", field="repository") from error
    return commit.commit_url
