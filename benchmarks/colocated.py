"""Measures the phases of a colocated run, in which trainer and engine share one GPU: seconds and bytes of each.

Run `python -m benchmarks.colocated NAME SHAPE [key=value ...]`, where SHAPE is one of
benchmarks.megatron_layouts.MODELS. Weights are random, and the config is that of the step benchmark with one trainer
rank and one engine, changed by the overrides, such as trainer.strategy=megatron or trainer.lora.rank=32. The first
publication (with joining and vLLM's reload) and the second, which checks that reload, are not in the samples. A later
step above twice the median is an error. The
timeline of all services is saved as results/NAME.trace.json.gz. MFU counts six operations per sampled token and
parameter of a matrix that the token meets, in the time that the trainer trains; prompts, attention, recomputation and
the forward before the update do not count. Give it at least ten minutes: before the first step,
the model is made and vLLM compiles it, which alone takes minutes where it never ran before.
"""

import argparse
import asyncio
import logging
import shutil
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console

from benchmarks.learning import read_metrics
from benchmarks.loop import kept
from benchmarks.random_model import add_options, make_random_model
from benchmarks.report import keep, keep_trace
from benchmarks.step import TINY, TOKENIZER, WHOLE, fixed
from benchmarks.train import PEAK_FLOPS
from services.common.config.load import load
from services.common.config.run import Config
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe.frontend import TerminalFrontend
from services.coordinator.rl import publishing
from services.coordinator.rl.session import run_session

_CONFIG = "deploy/runs/quickstart.yaml"
_SHARED = ("placement=colocated", "trainer.num_ranks=1", "rollout.num_replicas=1", "num_steps=8")
_WARM_UP = 2
_UNITS = ("[s]", "[GB freed]", "[GB taken]", "[GB free on the GPU]")


class Phases(logging.Handler):
    """Collects the numbers that the colocated publisher logs for each phase."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.samples: dict[str, list[float]] = defaultdict(list)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the numbers of one phase."""
        if isinstance(record.args, tuple) and len(record.args) == 1 + len(_UNITS):
            what, *numbers = record.args
            for unit, number in zip(_UNITS, numbers, strict=True):
                self.samples[f"{what} {unit}"].append(float(str(number)))


def active_parameters(model: Path) -> int:
    """Returns the number of entries of all matrices that a token of text meets, with its share of the experts."""
    import torch
    from transformers import AutoConfig

    from services.trainer.structure import make_model

    config = AutoConfig.from_pretrained(model)
    text = config.get_text_config()
    num_experts = getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0)
    num_experts = num_experts or getattr(text, "n_routed_experts", 0)
    total = 0.0
    with torch.device("meta"):
        parameters = make_model(config, dtype=torch.bfloat16).named_parameters()
    for name, parameter in parameters:
        if parameter.ndim < 2 or "visual" in name or ("embed_tokens" in name and not text.tie_word_embeddings):
            continue
        total += parameter.numel() * (text.num_experts_per_tok / num_experts if ".experts." in name else 1)
    return round(total)


def speed(steps: list[dict[str, float]], num_parameters: int) -> dict[str, list[float]]:
    """Returns the speed of the trainer in each step, and its MFU against the dense bfloat16 rate of H100 and H200."""
    rates = [step["batch/tokens"] / step["time/train_busy_s"] for step in steps]
    return {
        "sampled tokens trained [tokens/s]": rates,
        "MFU [share]": [6 * num_parameters * rate / PEAK_FLOPS for rate in rates],
    }


def measure(config: Config) -> dict[str, list[float]]:
    """Runs `config`. Returns the samples of its phases and of its steps, after the warm-up."""
    phases, log = Phases(), logging.getLogger(publishing.__name__)
    log.addHandler(phases)
    log.setLevel(logging.INFO)
    asyncio.run(run_session(config, Addresses(), TerminalFrontend(Console())))
    steps = [line for line in read_metrics(config.run_dir) if "time/step_s" in line][_WARM_UP:]
    seconds = [step["time/step_s"] for step in steps]
    if max(seconds) > 2 * statistics.median(seconds):
        raise RuntimeError(f"a step takes over twice the median, as if something was compiled again: {seconds}")
    samples = {name: values[_WARM_UP:] for name, values in phases.samples.items()}
    trained = speed(steps, active_parameters(Path(config.model)))
    return {name: values for name, values in samples.items() if any(values)} | kept(steps) | trained


def main() -> None:
    """Makes the model, runs the steps, and saves the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocated")
    parser.add_argument("name")
    parser.add_argument("shape")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    add_options(parser)
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model = make_random_model(directory, options.shape, options)
        for name in TOKENIZER:
            shutil.copy(Path("deploy/quickstart/model") / name, model)
        sizes = TINY if options.tiny else WHOLE
        overrides = [*fixed(model, sizes), *_SHARED, *options.overrides]
        config = load(Config, [_CONFIG, *overrides, f"runs_dir={directory}/runs"])
        try:
            samples = measure(config)
        except Exception:
            for path in (config.run_dir / "logs").glob("*.log"):
                Console().print(path.name, path.read_text(errors="replace")[-3000:], markup=False)
            raise
        libraries = ("torch", "vllm", "transformers")
        keep(options.name, samples, libraries=libraries, shape=options.shape, weights="random", overrides=overrides)
        keep_trace(options.name, config.run_dir)


if __name__ == "__main__":
    main()
