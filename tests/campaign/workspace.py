"""The model, the data and the configs of a campaign's runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.support import ROOT

NUM_STEPS, SAVE_FREQ = 6, 2
_MODEL = ROOT / "deploy" / "quickstart" / "model"
TROUBLE = "trouble"
"""The file that says what is wrong with the environment's code, beside that code."""
_GAME = """
import pathlib
import time

def has_trouble():
    try:
        what = pathlib.Path(__file__).with_name("trouble").read_text()
    except FileNotFoundError:
        return False
    if what == "raises":
        raise RuntimeError("the campaign's environment fails")
    if what == "hangs":
        time.sleep(1000)
    return what == "lies"

def score(*, completion, **_):
    return sum(c.isdigit() for c in completion) / max(1, len(completion))

class Echo:
    def reset(self, seed, row):
        self.turn = 0
        return [{"role": "", "content": str(seed % 10)}]

    def step(self, text):
        self.turn += 1
        if has_trouble():
            return "nonsense"
        return [{"role": "", "content": f"={len(text)}="}], float(self.turn), self.turn == 2
"""
# Well above what the toys need on a busy machine, and below the faults that are to pass a deadline.
_TIMEOUTS = {"info_s": 3, "open_s": 30, "generate_s": 5, "score_s": 5, "train_s": 5, "publish_s": 5, "memory_s": 5}
LEASE_S = 12.0
REAL_IS_SLOWER = 10.0
"""All deadlines of a run on real services are this many times those of a run on toys."""
_ENVIRONMENT = {"kind": "python", "path": "game:Echo", "max_turns": 2, "turn_s": 5, "on_failure": "fail"}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"trainer": {"max_tokens_per_microbatch": 16}},
    "lagged": {"trainer": {"lag": {"versions": 1}, "loss": {"old_logprobs": "engine"}}},
    "colocated": {"placement": "colocated"},
    "episodes": {
        "environment": {"kind": "python", "path": "game:Echo", "max_turns": 2, "turn_s": 5, "on_failure": "fail"}
    },
}
# Rewards that differ, so that every update changes the weights.
_REAL: dict[str, Any] = {
    "rollout": {"max_samples": 4},
    "reward": {"scorers": [{"kind": "python", "path": "game:score"}], "timeout_s": 30},
    "trainer": {"optim": {"lr": 1e-3}},
}


def make_files(directory: Path, *, is_real: bool = False) -> None:
    """Writes model, data and environment, once for all runs."""
    model = directory / "model"
    model.mkdir()
    for file in _MODEL.iterdir():
        if is_real or file.suffix != ".safetensors":
            shutil.copy(file, model)
    settings = json.loads((model / "config.json").read_text())
    if not is_real:
        (model / "config.json").write_text(json.dumps(settings | {"vocab_size": 64}))  # toys sample tokens below 52
    rows = {"prompt": [f"{index}+1=" for index in range(8)], "answer": [str(index + 1) for index in range(8)]}
    pq.write_table(pa.table(rows), directory / "rows.parquet")
    pq.write_table(pa.table(rows).slice(0, 1), directory / "held_out.parquet")
    (directory / "game.py").write_text(_GAME)


def write_config(directory: Path, files: Path, variant: str, *, is_real: bool = False) -> None:
    """Writes the config of a run whose files are in `directory`."""
    slower = REAL_IS_SLOWER if is_real else 1.0
    timeouts = _TIMEOUTS | {"checkpoint_s": 5, "lease_s": LEASE_S}
    config = {
        "name": "run",
        "runs_dir": str(directory / "runs"),
        "model": str(files / "model"),
        "num_steps": NUM_STEPS,
        "data": {
            "train": str(files / "rows.parquet"),
            "eval": {"test": str(files / "held_out.parquet")},
            "prompts_per_step": 2,
            "max_prompt_tokens": 6,
        },
        "rollout": {"num_replicas": 2, "completions_per_prompt": 2, "max_model_len": 64, "sampling": {"max_tokens": 8}},
        "reward": {"scorers": [{"kind": "exact"}], "on_failure": "fail"},
        "trainer": {"num_ranks": 2, "max_tokens_per_microbatch": 256},
        "evaluation": {"eval_freq": 3},
        "checkpoint": {"save_freq": SAVE_FREQ, "max_ckpts_to_keep": 10},
        "weights": {"timeout_s": 2 * slower},
        "timeouts": {name: seconds * slower for name, seconds in timeouts.items()},
    }
    for changes in (_REAL if is_real else {}, VARIANTS[variant]):
        for name, change in changes.items():
            config[name] = {**config[name], **change} if isinstance(config.get(name), dict) else change
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
