"""Measures the phases of a step with a real model shape, with trainer and engines on separate GPUs; keeps a timeline.

Run `python -m benchmarks.step NAME SHAPE [key=value ...]`, where SHAPE is one of benchmarks.megatron_layouts.MODELS.
Weights are random, and completions have the lengths of the training benchmark's fixture. The rest of the config is the
quickstart's. The timeline of all services, for chrome://tracing or Perfetto, is saved as results/NAME.trace.json.gz.
"""

import argparse
import gzip
import shutil
import tempfile
from pathlib import Path

from benchmarks.lengths import MAX_TOKENS, PROMPT_TOKENS
from benchmarks.loop import measure
from benchmarks.random_model import add_options, make_random_model
from benchmarks.report import RESULTS

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TINY = {"prompts_per_step": 4, "max_tokens": 64, "shorter_by": 32}
WHOLE = {"prompts_per_step": 64, "max_tokens": MAX_TOKENS - PROMPT_TOKENS, "shorter_by": 2}


def fixed(model: Path, sizes: dict[str, int]) -> list[str]:
    """Returns the config that the overrides of the command line apply to."""
    return [
        f"model={model}",
        "num_steps=6",
        "trace=true",
        "data.eval={}",
        "checkpoint.save_freq=0",
        f"data.prompts_per_step={sizes['prompts_per_step']}",
        f"rollout.max_model_len={sizes['max_tokens'] + 16}",
        f"rollout.sampling.max_tokens={sizes['max_tokens']}",
        "rollout.max_samples=512",
        "rollout.engine.scheduler_cls=benchmarks.rollout_lengths.scheduler",
        f"rollout.engine.additional_config={{mean_tokens: 819, shorter_by: {sizes['shorter_by']}}}",
        "trainer.max_tokens_per_microbatch=16384",
        "trainer.max_logprob_gap=1",
    ]


def main() -> None:
    """Makes the model, runs six steps, and saves measurements and timeline."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step")
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
        run_dir = measure(options.name, [*fixed(model, sizes), *options.overrides], directory, shape=options.shape)
        with (
            (run_dir / "trace.json").open("rb") as trace,
            gzip.open(RESULTS / f"{options.name}.trace.json.gz", "wb") as kept,
        ):
            shutil.copyfileobj(trace, kept)


if __name__ == "__main__":
    main()
