"""Tests episodes of several turns from end to end, with real services and an environment that echoes the policy."""

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from services.coordinator.text.tokenizer import Tokenizer
from tests.e2e.lockstep_command import LockstepRun, invoke, make_sums, numbers

MODEL = Path(__file__).parents[2] / "deploy" / "quickstart" / "model"
NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 2, 4, 4
MAX_TURNS, MAX_TURN_TOKENS = 3, 5
# An answer whose digits add up to 1, 4, 7, ... ends the episode. Messages are raw text: there is no chat template.
_ENVIRONMENT = """
class Echo:
    def reset(self, seed, row):
        self.turn = 0
        return [{"role": "", "content": str(seed % 10)}]

    def step(self, text):
        self.turn += 1
        digits = sum(int(c) for c in text if c.isdigit())
        return [{"role": "", "content": f"={text}="}], self.turn + digits / 8, digits % 3 == 1
"""


def play(workspace: Path, *overrides: str) -> None:
    with LockstepRun(workspace, *overrides) as run:
        assert run.wait() == 0, run.output + run.log


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, lent: Sequence[str]) -> Path:
    """Returns the directory of a run that has ended."""
    directory = tmp_path_factory.mktemp("episodes")
    shutil.copytree(MODEL, directory / "model")
    make_sums(directory / "data")
    (directory / "game.py").write_text(_ENVIRONMENT)
    config = {
        "name": "run",
        "model": str(directory / "model"),
        "num_steps": NUM_STEPS,
        "data": {
            "train": "data/train.parquet",
            "eval": {"test": "data/test.parquet"},
            "prompts_per_step": NUM_PROMPTS,
            "max_prompt_tokens": 8,
        },
        "rollout": {
            "num_replicas": 1,
            "completions_per_prompt": NUM_SAMPLES,
            "max_model_len": 64,
            "max_samples": 8,
            "sampling": {"max_tokens": MAX_TURN_TOKENS, "top_p": 0.9, "top_k": 20},
        },
        "environment": {"kind": "python", "path": "game:Echo", "max_turns": MAX_TURNS, "on_failure": "fail"},
        "reward": {"scorers": [{"kind": "exact"}], "on_failure": "fail"},
        "advantage": {"kind": "per_turn"},
        "trainer": {"num_ranks": 2, "max_tokens_per_microbatch": 1024, "optim": {"lr": 1e-3}},
        "evaluation": {"eval_freq": 2},
        "checkpoint": {"save_freq": 1, "export_at_end": False},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    play(directory, *lent[:2])
    return directory


def batches(workspace: Path, name: str = "run") -> list[Path]:
    return sorted((workspace / "runs" / name / "batches").glob("*.parquet"))


def test_turns_masks_and_rewards_are_those_of_the_environment(workspace: Path):
    tokenizer = Tokenizer.load(MODEL)
    rows = [row for path in batches(workspace) for row in pq.read_table(path).to_pylist()]
    assert len(rows) == NUM_STEPS * NUM_PROMPTS * NUM_SAMPLES
    assert len({len(row["turn_begins"]) for row in rows}) > 1, "some episodes end early"
    for row in rows:
        assert tokenizer.decode(row["prompt_tokens"])[-2] == "=", "the environment's first message follows"
        begins, ends, tokens = row["turn_begins"], row["turn_ends"], row["tokens"]
        turns = [tokens[begin:end] for begin, end in zip(begins, ends, strict=True)]
        texts = [tokenizer.decode(turn) for turn in turns]
        digits = [sum(int(c) for c in text if c.isdigit()) for text in texts]
        assert row["turn_rewards"] == [1 + turn + number / 8 for turn, number in enumerate(digits)]
        components = dict(row["components"])
        assert components["environment"] == sum(row["turn_rewards"])
        assert row["reward"] == components["environment"] + components["exact"]
        assert all(number % 3 != 1 for number in digits[:-1]), "the environment ends it otherwise"
        assert digits[-1] % 3 == 1 or len(turns) == MAX_TURNS
        for text, end, begin in zip(texts, ends, begins[1:], strict=False):
            assert tokens[end:begin] == tokenizer.encode(f"={text}=")
        sampled = set(itertools.chain(*map(range, begins, ends)))
        assert row["loss_mask"] == [position in sampled for position in range(len(tokens))]
        assert all(row["logprobs"][at] == 0 for at in range(len(tokens)) if at not in sampled)
        assert all(0 < len(turn) <= MAX_TURN_TOKENS for turn in turns)


def test_the_trainer_computes_the_engines_logprobs_over_all_turns(workspace: Path):
    steps = [line for line in numbers(workspace) if "reward/mean" in line]
    assert len(steps) == NUM_STEPS
    # float32 in engine and trainer, as in tests/rollout.
    assert max(line["train/logprob_diff_max"] for line in steps) <= 1e-4
    assert all(line["train/grad_norm"] > 0 for line in steps)
    assert all(1 < line["sampling/kept_tokens_mean"] <= 20 for line in steps)  # these logprobs are over sampling masks
    assert all(1 < line["episode/turns_mean"] <= MAX_TURNS for line in steps)


@pytest.mark.long  # tests/fault/test_episodes_disturbed.py has two runs whose samples are the same, too
def test_the_same_run_again_asks_for_the_same_samples(workspace: Path, lent: Sequence[str]):
    """Compares only what is asked: the engine's prefix cache, and so the last bits of later turns, depend on timing."""
    play(workspace, "name=again", *lent[:2])
    first, again = batches(workspace), batches(workspace, "again")
    assert len(first) == len(again) == NUM_STEPS
    asked = ["prompt_id", "group", "sample", "prompt_tokens", "seed", "environment"]
    for one, other in zip(first, again, strict=True):
        assert pq.read_table(one, columns=asked).equals(pq.read_table(other, columns=asked))


def test_a_step_is_the_same_again_to_environment_scorers_and_trainer(workspace: Path, lent: Sequence[str]):
    for what in (lent[:1], ["--what", "environment"]):
        done = invoke("replay", "runs/run", "--step", 2, *what, cwd=workspace)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 2: identical to the record" in done.stdout + done.stderr
    (workspace / "game.py").write_text(_ENVIRONMENT.replace("={text}=", "-{text}="))
    done = invoke("replay", "runs/run", "--step", 2, "--what", "environment", cwd=workspace)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "turn 0 reply from token 0: recorded" in done.stdout + done.stderr
