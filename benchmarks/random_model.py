"""Makes models with a real shape and random weights, for benchmarks that start services on them."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Returns a parser of the options that `make_random_model` takes."""
    parser.add_argument("--tiny", action="store_true", help="use a small model and short samples, for CPU")
    parser.add_argument(
        "--models", type=Path, metavar="DIR", help="directory to make the model in, or to reuse it from"
    )


def make_random_model(directory: Path, shape: str, options: argparse.Namespace) -> Path:
    """Makes DIRECTORY/SHAPE, with links to kept weights, in a process of its own that leaves no memory on a GPU."""
    name, models = f"{shape}-tiny" if options.tiny else shape, (options.models or directory).absolute()
    models.mkdir(parents=True, exist_ok=True)
    if not (models / name).exists():
        with tempfile.TemporaryDirectory(dir=models) as unfinished:
            tiny = ["tiny"] if options.tiny else []
            command = [sys.executable, "-m", "benchmarks.megatron_model", unfinished, shape, *tiny, "weights-only"]
            subprocess.run(command, check=True)
            if not (models / name).exists():  # another benchmark may have made it meanwhile
                Path(unfinished, shape).rename(models / name)
    if models / name != directory / shape:
        (directory / shape).mkdir()
        for file in (models / name).iterdir():
            place = os.symlink if file.suffix == ".safetensors" else shutil.copy
            place(file, directory / shape / file.name)
    return directory / shape
