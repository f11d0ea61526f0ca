"""Measures verl's GRPO on one GPU with the workload of `benchmarks.colocated`, to compare seconds per step.

Run `python -m benchmarks.peers_verl NAME SHAPE [--setting SETTING ...] [--steps N]` on the host and in the hour of the
colocated benchmark, with verl and what it needs in the directory `--site`. Each of SETTINGS runs as
`python -m verl.trainer.main_ppo`: the same prompts, 512 samples a step in groups of 8, the same lengths as for
benchmarks.peers, one optimizer step for each batch, AdamW, float32 weights and bfloat16 computation, whole sequences
packed without padding. flash-attn has no wheel for torch 2.11, so that its functions are those of torch here, which has
the same kernels (benchmarks/flash_attn_of_torch). Rewards are random.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.lengths import MAX_TOKENS, PROMPT_TOKENS
from benchmarks.peers import make_parser
from benchmarks.random_model import make_random_model
from benchmarks.report import keep

_BYPASS = "algorithm.rollout_correction.bypass_mode=true"
_AWAKE = "actor_rollout_ref.rollout.free_cache_engine=false"
_FUSED = "actor_rollout_ref.model.use_fused_kernels=true"
_STORED = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
SETTINGS: Mapping[str, list[str]] = {
    "as it comes": [],
    "fused kernels, no checkpointing": [_FUSED, _STORED],
    "fused kernels, no checkpointing, log-probabilities of the engine": [_FUSED, _STORED, _BYPASS],
    "fused kernels, no checkpointing, log-probabilities of the engine, vLLM does not sleep": [
        _FUSED,
        _STORED,
        _BYPASS,
        _AWAKE,
    ],
}
_TIMES = ("step", "gen", "old_log_prob", "update_actor", "update_weights")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOKENS_PER_MICRO_BATCH = 32_768
_TIMEOUT_S = 420.0
_WARM_UP = 1


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Returns a random reward, as verl calls a reward function."""
    return random.random()


def make_tokenizer(model: Path) -> None:
    """Saves the tokenizer of the quickstart in directory `model`, with the tokens that verl needs of a Qwen model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("deploy/quickstart/model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["\n", "user", "assistant"])
    tokenizer.chat_template = _TEMPLATE
    tokenizer.model_max_length = MAX_TOKENS
    tokenizer.save_pretrained(model)


def make_rows(path: Path) -> None:
    """Writes the quickstart's prompts to `path` as verl reads them."""
    rows = pq.read_table("data/arithmetic/train.parquet").to_pylist()
    pq.write_table(
        pa.Table.from_pylist(
            [
                {
                    "data_source": "arithmetic",
                    "prompt": [{"role": "user", "content": row["prompt"]}],
                    "reward_model": {"style": "rule", "ground_truth": row["answer"]},
                }
                for row in rows
            ]
        ),
        path,
    )


def overrides(model: Path, rows: Path, options: argparse.Namespace) -> list[str]:
    """Returns what every setting tells verl."""
    max_tokens = (MAX_TOKENS - PROMPT_TOKENS) // options.shorter_by
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.train_batch_size=64",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={max_tokens}",
        f"actor_rollout_ref.model.path={model}",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=64",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={_TOKENS_PER_MICRO_BATCH}",
        f"{actor}.optim.lr=1e-6",
        f"{rollout}.name=vllm",
        f"{rollout}.n=8",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.4",
        f"{rollout}.max_num_seqs=512",
        f"{rollout}.max_model_len={max_tokens + PROMPT_TOKENS}",
        f"{rollout}.ignore_eos=true",
        f"+{rollout}.engine_kwargs.vllm.scheduler_cls=benchmarks.peers.scheduler",
        f"+{rollout}.engine_kwargs.vllm.additional_config='{{\"shorter_by\": {options.shorter_by}}}'",
        f"reward.custom_reward_function.path={Path(__file__).absolute()}",
        "reward.custom_reward_function.name=score",
        "trainer.logger=[console,file]",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={options.steps}",
        "+ray_kwargs.ray_init.include_dashboard=false",
    ]


def train(setting: str, told: list[str], out: Path, site: Path) -> Mapping[str, list[float]]:
    """Trains with one setting. Returns its samples, without the first step; none if it fails."""
    path = [
        Path(__file__).parent / "flash_attn_of_torch",
        site,
        Path.cwd(),
        *os.environ.get("PYTHONPATH", "").split(":"),
    ]
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, path)), "VERL_FILE_LOGGER_PATH": str(out), "VLLM_PLUGINS": ""}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *told, *SETTINGS[setting]]
    samples: dict[str, list[float]] = defaultdict(list)
    begin, lines = time.monotonic(), deque[str](maxlen=60)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        for line in run.stdout or ():
            lines.append(line)
            if re.search(r"\bstep:1 ", line):
                samples["first update [s]"].append(time.monotonic() - begin)
            if time.monotonic() - begin > _TIMEOUT_S:
                run.terminate()
    if run.returncode:
        Console().print(*lines, sep="", markup=False)
    for line in out.read_text().splitlines()[_WARM_UP:] if out.exists() else ():
        measured = json.loads(line)["data"]
        for name in _TIMES:
            if (seconds := measured.get(f"timing_s/{name}")) is not None:
                samples[f"{name} [s]"].append(seconds)
        samples["sampled [tokens]"].append(512 * measured["response_length/mean"])
    return samples


def main() -> None:
    """Makes the model, runs every setting, and saves the result."""
    parser = make_parser("python -m benchmarks.peers_verl", SETTINGS)
    parser.set_defaults(steps=6)
    parser.add_argument("--site", type=Path, required=True, help="directory in which verl is installed")
    options = parser.parse_args()
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        model, rows = make_random_model(Path(name), options.shape, options), Path(name) / "train.parquet"
        make_tokenizer(model)
        make_rows(rows)
        for number, setting in enumerate(options.setting or SETTINGS):
            out = Path(name) / f"{number}.jsonl"
            found = train(setting, overrides(model, rows, options), out, options.site)
            samples |= {f"verl, {setting}: {quantity}": values for quantity, values in found.items() if values}
    keep(
        options.name,
        samples,
        libraries=("torch", "vllm"),
        shape=options.shape,
        settings=dict(SETTINGS),
        shorter_by=options.shorter_by,
        installed=sorted(path.stem for path in options.site.glob("*.dist-info")),
    )


if __name__ == "__main__":
    main()
