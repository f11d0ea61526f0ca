"""Trains every model of the tests' zoo for three steps with the real services on CPU: vLLM, trainer, reward.

`python -m benchmarks.models_with_engine [MODEL ...]` measures the named models, or all, one after another, and keeps
what earlier calls measured. Writes results/models-with-engine.json: the largest difference between the engine's and
the trainer's log-probabilities in each step, or why the model cannot be served; and the table in docs/models.md. Takes
most of an hour on two cores.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.learning import read_metrics
from benchmarks.models import write_table
from benchmarks.report import RESULTS, keep
from tests.e2e.lockstep_command import LOCKSTEP, make_sums
from tests.support import free_port, running, service_command
from tests.trainer.zoo import ZOO

_NAME = "models-with-engine"
_RUN_S = 3000
_SCORER = """
def score(*, completion, **_):
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
"""
# The only sizes that vLLM's latent attention has on CPU.
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Sizes in which a model differs from the zoo's, because the engine serves no others.
SIZES: Mapping[str, Mapping[str, int]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v3_yarn": _LATENT,
    "glm4_moe_lite": _LATENT,
    "kimi_linear": _LATENT,
}


def main() -> None:
    left = sys.argv[1:] or list(ZOO)
    while left:
        with tempfile.TemporaryDirectory() as name, _services(Path(name)) as options:
            is_well = True
            while left and is_well:  # what has failed may have ended a service
                model = left.pop(0)
                result = train(model, Path(name) / model, options)
                is_well = not isinstance(result, str)
                _keep(model, result)


@contextmanager
def _services(workspace: Path) -> Iterator[list[str]]:
    """Starts the services, for one model after another; yields the options with which `lockstep run` finds them."""
    (workspace / "digits.py").write_text(_SCORER)
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("trainer", "rollout", "reward")}
    with ExitStack() as stack:
        with chdir(workspace):  # from which the reward service imports the scorer
            for name, address in addresses.items():
                stack.enter_context(running(service_command(name, address), workspace / f"{name}.log"))
        yield [f"--{name}={address}" for name, address in addresses.items()]


def _keep(model: str, result: list[float] | str) -> None:
    path, label = RESULTS / f"{_NAME}.json", f"{model}: largest difference in a step [nats]"
    earlier = json.loads(path.read_text()) if path.exists() else {"samples": {}, "settings": {"failed": {}}}
    samples, failed = dict(earlier["samples"]), dict(earlier["settings"]["failed"])
    samples.pop(label, None)
    failed.pop(model, None)
    if isinstance(result, str):
        failed[model] = result
    else:
        samples[label] = result
    libraries = ("torch", "transformers", "vllm")
    keep(_NAME, dict(sorted(samples.items())), libraries=libraries, failed=dict(sorted(failed.items())))
    write_table()


def train(model: str, workspace: Path, options: Sequence[str]) -> list[float] | str:
    """Returns the largest difference of log-probabilities in each of three steps, in nats, or why the run failed."""
    from benchmarks.megatron_model import add_published_keys  # imports torch
    from tests.trainer.zoo_harness import make_zoo_model

    make_zoo_model(model, workspace / "model", **SIZES.get(model, {}))
    add_published_keys(workspace / "model", ZOO[model][0])
    make_sums(workspace / "data")
    (workspace / "run.yaml").write_text(yaml.safe_dump(_run_config(workspace)))
    command = [LOCKSTEP, "run", "run.yaml", *options]
    try:
        ended = subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=_RUN_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no three steps within {_RUN_S} s"
    if ended.returncode:
        return ended.stderr.strip().splitlines()[-1]
    steps = read_metrics(workspace / "runs" / "run")
    return [step["train/logprob_diff_max"] for step in steps if "train/logprob_diff_max" in step]


def _run_config(workspace: Path) -> dict[str, Any]:
    return {
        "name": "run",
        "model": str(workspace / "model"),  # where the trainer finds it, too
        "num_steps": 3,
        "data": {"train": "data/train.parquet", "prompts_per_step": 4, "max_prompt_tokens": 16},
        "rollout": {"completions_per_prompt": 4, "max_model_len": 64, "sampling": {"max_tokens": 32}},
        "trainer": {"max_tokens_per_microbatch": 256, "optim": {"lr": 1e-3}, "max_logprob_diff": 100.0},
        "reward": {"scorers": [{"kind": "python", "path": "digits:score"}], "num_workers": 1},
    }


if __name__ == "__main__":
    main()
