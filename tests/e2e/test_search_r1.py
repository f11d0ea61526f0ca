"""Runs Search-R1 from end to end on the small corpus of deploy/quickstart, with real services."""

import asyncio
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.quickstart import make_search
from services.common.config.environment import SearchToolConfig
from services.coordinator.text.tokenizer import Tokenizer
from services.reward.environments.search import Search
from services.reward.scorers.text import normalize
from tests.e2e.lockstep_command import LockstepRun, numbers
from tests.support import ROOT

# tests/e2e/test_episodes.py has shorter episodes, and tests/reward/environments the search.
pytestmark = pytest.mark.long

START = Path("data/search/start")
NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 2, 4, 4


def teach(model: Path, num_updates: int = 40) -> None:
    """Fits the random start to some of the demonstrations, so that it writes tags."""
    rows = pq.read_table("data/search/demonstrations.parquet").slice(0, 48).to_pylist()
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    texts = [row["prompt"] + row["response"] for row in rows if "Doc 2" not in row["response"]]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(num_updates):
        optimizer.zero_grad()
        policy(input_ids=batch.input_ids, labels=labels).loss.backward()
        optimizer.step()
    policy.save_pretrained(model)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, lent: Sequence[str]) -> Path:
    """Returns the directory of a run that has ended."""
    directory = tmp_path_factory.mktemp("search")
    with chdir(directory), pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_search, "NUM_WORLDS", 1)
        make_search.OUT.mkdir(parents=True)
        make_search.write_questions()
        make_search.write_start(str(START), asyncio.run(make_search.write_demonstrations()))
        teach(START)
    config = yaml.safe_load((ROOT / "deploy" / "runs" / "search.yaml").read_text())
    config |= {
        "name": "run",
        "model": str(directory / START),
        "num_steps": NUM_STEPS,
        "evaluation": {},
        "checkpoint": {},
    }
    config["data"] |= {"prompts_per_step": NUM_PROMPTS, "eval": {}}
    config["rollout"] |= {"completions_per_prompt": NUM_SAMPLES, "max_samples": 16}
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    with LockstepRun(directory, *lent[:2], "trainer.num_ranks=2", "checkpoint.export_at_end=false") as run:
        assert run.wait() == 0, run.output + run.log
    return directory


async def test_searches_get_documents_and_answers_get_exact_match(workspace: Path):
    with chdir(workspace):
        tokenizer, tool = Tokenizer.load(START), Search(SearchToolConfig(corpus="data/search/corpus.parquet"))
        await tool.open()
    rows = [
        row for path in sorted((workspace / "runs/run/batches").glob("*")) for row in pq.read_table(path).to_pylist()
    ]
    assert len(rows) == NUM_STEPS * NUM_PROMPTS * NUM_SAMPLES
    answers = {
        row["prompt"]: row["answers"] for row in pq.read_table(workspace / "data/search/train.parquet").to_pylist()
    }
    num_searches = 0
    for row in rows:
        begins, ends, tokens = row["turn_begins"], row["turn_ends"], row["tokens"]
        turns = [tokenizer.decode(tokens[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        for turn, end, begin in zip(turns, ends, begins[1:], strict=False):
            query = turn.partition("<search>")[2].removesuffix("</search>").strip()
            if turn.endswith("</search>") and turn.count("<search>") == 1 and query:
                found = await tool.call({"query": query}, 60.0)
                expected = tokenizer.encode(f"\n\n<information>{found}</information>\n\n")
                assert tokens[end:begin] == expected[:96]
                assert not any(row["loss_mask"][end:begin])
                num_searches += 1
        accepted = {normalize(answer) for answer in answers[tokenizer.decode(row["prompt_tokens"])]}
        said = turns[-1].rpartition("<answer>")[2]
        is_right = (
            "<answer>" in turns[-1] and "</answer>" in said and normalize(said.partition("</answer>")[0]) in accepted
        )
        assert row["reward"] == float(is_right)
    assert num_searches, "some episodes search"


def test_the_trainer_computes_the_engines_logprobs(workspace: Path):
    steps = [line for line in numbers(workspace) if "reward/mean" in line]
    assert len(steps) == NUM_STEPS and max(line["train/logprob_diff_max"] for line in steps) <= 1e-4
    assert max(line["episode/turns_mean"] for line in steps) > 1
