"""Measures the phases of a step with a real model shape, with trainer and engines on separate GPUs; keeps a timeline.

Run `python -m benchmarks.step NAME SHAPE [key=value ...]`, where SHAPE is one of benchmarks.megatron_layouts.MODELS.
Weights are random, and completions have the lengths of the training benchmark's fixture. The rest of the config is the
quickstart's. The timeline of all services, for chrome://tracing or Perfetto, is saved as results/NAME.trace.json.gz.

With `--compare-streaming` the same steps run twice with `trainer.streaming` auto and twice with off, in turns; the
result has both, and the ratios of their medians. There is no timeline then.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from benchmarks.lengths import MAX_TOKENS, PROMPT_TOKENS
from benchmarks.loop import measure, run, save
from benchmarks.random_model import add_options, make_random_model
from benchmarks.report import keep_trace

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TINY = {"prompts_per_step": 4, "max_tokens": 64, "shorter_by": 32}
WHOLE = {"prompts_per_step": 64, "max_tokens": MAX_TOKENS - PROMPT_TOKENS, "shorter_by": 2}


def fixed(model: Path, sizes: dict[str, int]) -> list[str]:
    """Returns the config that the overrides of the command line apply to."""
    return [
        f"model={model}",
        "num_steps=6",
        "rollout.torch_compile=true",  # as in a run of many steps; strategy fsdp has its own in the commands
        "trace=true",
        "evaluation.eval_freq=0",
        "evaluation.eval_before_train=false",
        "checkpoint.save_freq=0",
        "checkpoint.export_at_end=false",
        "restart.max=0",
        f"data.prompts_per_step={sizes['prompts_per_step']}",
        f"rollout.max_model_len={sizes['max_tokens'] + 16}",
        f"rollout.sampling.max_tokens={sizes['max_tokens']}",
        "rollout.max_samples=512",
        "rollout.engine.scheduler_cls=benchmarks.rollout_lengths.scheduler",
        f"rollout.engine.additional_config={{mean_tokens: 819, shorter_by: {sizes['shorter_by']}}}",
        "trainer.max_tokens_per_microbatch=16384",
        "trainer.max_logprob_diff=1",
    ]


def compare(name: str, overrides: list[str], directory: Path, **settings: str) -> None:
    """Runs the steps with and without streaming in turns, and saves the samples of both with their ratios."""
    samples: dict[str, list[float]] = {}
    for number, mode in enumerate(("auto", "off", "off", "auto")):
        _, found = run([*overrides, f"trainer.streaming={mode}", f"name=run-{number}"], directory)
        for label, values in found.items():
            samples.setdefault(f"{label}, streaming {mode}", []).extend(values)
    for label in ("step [s]", "train [s]"):
        auto, off = (statistics.median(samples[f"{label}, streaming {mode}"]) for mode in ("auto", "off"))
        samples[f"{label}, auto / off [ratio of medians]"] = [auto / off]
    save(name, samples, overrides, **settings)


def main() -> None:
    """Makes the model, runs six steps, and saves measurements and timeline."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step")
    parser.add_argument("name")
    parser.add_argument("shape")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--compare-streaming", action="store_true", help="run with and without trainer.streaming")
    add_options(parser)
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model = make_random_model(directory, options.shape, options)
        for name in TOKENIZER:
            shutil.copy(Path("deploy/quickstart/model") / name, model)
        sizes = TINY if options.tiny else WHOLE
        overrides = [*fixed(model, sizes), *options.overrides]
        if options.compare_streaming:
            compare(options.name, overrides, directory, shape=options.shape)
            return
        keep_trace(options.name, measure(options.name, overrides, directory, shape=options.shape))


if __name__ == "__main__":
    main()
