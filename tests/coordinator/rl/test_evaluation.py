"""Tests the metrics of held-out sets against other computations, and an evaluation's requests and files."""

import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from lockstep.reward.v1 import reward_pb2
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Completion, PolicyStamp
from pydantic import ValidationError

from services.common.batches import tokens_sha256
from services.common.config.evaluation import EvalSetConfig
from services.common.config.load import load
from services.common.config.rollout import SamplingConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput, LockstepError, Reason
from services.common.rpc.transfer import seal
from services.coordinator.rl.evaluation import eval_sampling, evaluate, pass_at_k
from services.coordinator.runs.clock import Phase
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from tests.coordinator.fake_services import FakeReplica, FakeReward, collector, make_config, make_prompt, replicas

STAMP = PolicyStamp(version=4, digest="d" * 32)
EVAL = {"easy": "easy.parquet", "hard": "hard.parquet", "plain": "plain.parquet"}
# By prompt: the rewards of its samples in order, their numbers of tokens, and how many were truncated.
REWARDS = {"p0": [1.0, 0.0, 0.5, 1.0], "p1": [0.0, 0.0, 0.0, 0.0], "p2": [1.0, 1.0, 1.0, 0.5]}


def test_pass_at_k_is_the_share_of_draws_with_a_pass():
    for num_samples in range(1, 8):
        for num_passed in range(num_samples + 1):
            passes = [True] * num_passed + [False] * (num_samples - num_passed)
            for k in range(1, num_samples + 1):
                draws = list(itertools.combinations(passes, k))
                share = sum(map(any, draws)) / len(draws)
                assert pass_at_k(num_samples, num_passed, k) == pytest.approx(share, abs=1e-15)
    # Factorials would overflow float64: 1 - (1 - 5/1000)(1 - 5/999)...
    assert pass_at_k(1000, 5, 100) == pytest.approx(1 - (900 * 899 * 898 * 897 * 896) / (1000 * 999 * 998 * 997 * 996))


class Replica(FakeReplica):
    """Gives the n-th sample of a prompt n + 2 tokens, truncates the last of four, and records the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, float, int]] = []

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        (prompt,), sampling = request.prompts, request.sampling
        asked = (prompt.prompt_id, len(prompt.seeds), round(sampling.temperature, 6), sampling.max_tokens)
        self.asked.append(asked)
        completions = [
            Completion(
                tokens=[index] * (index + 2),
                logprobs=[-1] * (index + 2),
                finish_reason=FINISH_REASON_LENGTH if index == 3 else FINISH_REASON_STOP,
                seed=seed,
            )
            for index, seed in enumerate(prompt.seeds)
        ]
        answer = pb.GenerateResponse(
            prompt_id=prompt.prompt_id,
            completions=completions,
            stamp=request.expected_stamp,
            prompt_num_tokens=len(prompt.tokens),
            prompt_sha256=tokens_sha256(prompt.tokens),
        )
        yield seal(request, answer)


class Scorer(FakeReward):
    """Gives the scores in REWARDS, and a failure for the samples in `failing`, named like p1/3."""

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        rewards = REWARDS[request.prompt_id][: len(request.candidates)]
        scores = [reward_pb2.Score(reward=r, components={"math": 2 * r, "truncated": 9.0}) for r in rewards]
        for sample in range(len(scores)):
            if f"{request.prompt_id}/{sample}" in self.failing:
                scores[sample] = reward_pb2.Score(failure=reward_pb2.Failure(reason=1, scorer="fake", message="slow"))
        return seal(request, reward_pb2.ScoreResponse(scores=scores, scorer="fake 1"))


@pytest_asyncio.fixture
async def evaluated(tmp_path: Path) -> AsyncIterator[tuple[Run, Replica, dict[str, float]]]:
    sets = {
        "easy": {"temperature": 0.6, "num_samples": 4, "pass_k": [1, 2, 4], "max_tokens": 33},
        "hard": {"num_samples": 1, "pass_k": [1], "pass_threshold": 0.5, "max_prompts": 2},
    }
    config = make_config(
        runs_dir=tmp_path,
        data={"train": "x.parquet", "eval": EVAL, "prompts_per_step": 8},
        evaluation={"max_tokens": 22, "sets": sets},
        rollout={"sampling": {"temperature": 0.9, "max_tokens": 11}},
    )
    with contextlib.closing(Run(config, open_run(config))) as run:
        async with replicas(1, Replica) as fakes, collector(config, fakes, Scorer(set()), STAMP) as collects:
            prompts = [make_prompt(index) for index in range(3)]
            yield run, fakes[0], await evaluate(run, collects, dict.fromkeys(EVAL, prompts), STAMP)


async def test_numbers_and_samples_of_every_set(evaluated: tuple[Run, Replica, dict[str, float]]):
    run, replica, metrics = evaluated
    expected = {
        "eval/easy/reward": 6 / 12,
        "eval/easy/pass@1": (2 / 4 + 0 + 3 / 4) / 3,
        "eval/easy/pass@2": ((1 - 1 / 6) + 0 + 1) / 3,
        "eval/easy/pass@4": 2 / 3,
        "eval/easy/tokens_mean": 3.5,
        "eval/easy/truncated": 0.25,  # not the component of the same name
        "eval/easy/math": 1.0,
        "eval/hard/reward": 0.5,
        "eval/hard/pass@1": 0.5,
        "eval/hard/tokens_mean": 2.0,
        "eval/hard/truncated": 0.0,
        "eval/hard/math": 1.0,
        "eval/plain/reward": 2 / 3,
        "eval/plain/tokens_mean": 2.0,
        "eval/plain/truncated": 0.0,
        "eval/plain/math": 4 / 3,
    }
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert list(metrics) == list(expected)
    for name in EVAL:  # what the config may name
        of_set = {metric.removeprefix(f"eval/{name}/") for metric in metrics if metric.startswith(f"eval/{name}/")}
        assert of_set | {"failed"} == set(run.config.evaluation.metrics(name, ["math"], None))
    (recorded,) = run.record.ledger.all(Kind.EVALUATED)
    assert recorded == {"version": 4, **metrics}
    (shown,) = run.record.evaluations()
    assert shown == recorded
    ordered = ["reward", "math", "pass@1", "pass@2", "pass@4", "tokens_mean", "truncated"]
    assert list(shown)[:8] == ["version", *(f"eval/easy/{metric}" for metric in ordered)]

    # Sets are evaluated one after another; the prompts of a set arrive in any order.
    assert sorted(replica.asked[:3]) == [(f"p{index}", 4, 0.6, 33) for index in range(3)]
    assert sorted(replica.asked[3:5]) == [(p, 1, 0.0, 22) for p in ("p0", "p1")]
    assert sorted(replica.asked[5:]) == [(p, 1, 0.0, 22) for p in ("p0", "p1", "p2")]
    for name, num_rows in (("easy", 12), ("hard", 2), ("plain", 3)):
        samples = pq.read_table(run.config.run_dir / "evaluations" / f"{name}-step-000004.parquet")
        assert samples.num_rows == num_rows
        assert set(samples["policy_digest"].to_pylist()) == {STAMP.digest}
        ids, indices = samples["prompt_id"].to_pylist(), samples["sample"].to_pylist()
        of_rows = [REWARDS[prompt_id][index] for prompt_id, index in zip(ids, indices, strict=True)]
        assert samples["reward"].to_pylist() == of_rows


def test_the_time_of_an_evaluation_is_told_with_it_and_not_with_the_next_step(tmp_path: Path, monkeypatch):
    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(seconds), time_ns=time.time_ns)
    for module in ("services.coordinator.runs.clock", "services.common.telemetry"):
        monkeypatch.setattr(f"{module}.time", clock)
    told: list[dict[str, float]] = []
    reporter = Reporter()
    reporter.evaluation = lambda version, metrics: told.append(metrics)
    config = make_config(runs_dir=tmp_path)
    with contextlib.closing(Run(config, open_run(config))) as run:
        run.begin(4, [reporter])
        with run.phase(Phase.EVALUATING):
            next(seconds)
        run.finish_evaluation(4, {"eval/test/reward": 0.5})
        with run.phase(Phase.TRAINING):
            next(seconds)
        assert told == [{"eval/test/reward": 0.5, "time/evaluating_s": 2}]
        # Of 0, 1, ... 9: the step began at 1, its span at 2, evaluating took 3 to 5, training 6 to 8.
        assert run.clock.metrics() == {"time/training_s": 2, "time/step_s": 6, "time/outside_share": 1 - 2 / 6}


@pytest.fixture
def evaluate_failing(tmp_path: Path) -> Callable[[str, set[str]], Awaitable[dict[str, float]]]:
    """Evaluates p0, p1 and p2 with four samples each, for a given policy and failing samples."""

    async def evaluates(on_failure: str, failing: set[str]) -> dict[str, float]:
        config = make_config(
            runs_dir=tmp_path / on_failure,
            data={"train": "x.parquet", "eval": {"math": "math.parquet"}, "prompts_per_step": 8},
            evaluation={"sets": {"math": {"temperature": 0.6, "num_samples": 4, "pass_k": [1, 4]}}},
            reward={"scorers": [{"kind": "exact"}], "on_failure": on_failure},
        )
        with contextlib.closing(Run(config, open_run(config))) as run:
            async with replicas(1, Replica) as fakes, collector(config, fakes, Scorer(failing), STAMP) as collects:
                return await evaluate(run, collects, {"math": [make_prompt(index) for index in range(3)]}, STAMP)

    return evaluates


@pytest.mark.parametrize("on_failure", ["drop_group", "zero"])
async def test_samples_that_cannot_be_scored_count_as_0_and_are_reported(evaluate_failing, on_failure: str):
    metrics = await evaluate_failing(on_failure, {"p2/0", "p2/1", "p0/0"})
    # p0: -, 0, 0.5, 1; p1: 0, 0, 0, 0; p2: -, -, 1, 0.5
    assert metrics["eval/math/failed"] == 3.0
    assert metrics["eval/math/reward"] == pytest.approx(3.0 / 12)
    assert metrics["eval/math/pass@1"] == pytest.approx((1 / 4 + 0 + 1 / 4) / 3)
    assert metrics["eval/math/pass@4"] == pytest.approx(2 / 3)


async def test_an_evaluation_without_any_score_and_one_that_may_not_fail_are_errors(evaluate_failing):
    for on_failure, failing, message in (
        (
            "drop_group",
            {f"p{prompt}/{sample}" for prompt in range(3) for sample in range(4)},
            "data.eval.math: none.*fake: TIMEOUT: slow",
        ),
        ("fail", {"p2/0"}, "p2.*slow"),
    ):
        with pytest.raises(LockstepError, match=message) as raised:
            await evaluate_failing(on_failure, failing)
        assert raised.value.reason is Reason.REWARD_FAILED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pass_k": [4]}, "pass_k 4 is above num_samples 1: raise num_samples to at least 4"),
        ({"temperature": 1, "num_samples": 4, "pass_k": [1, 8]}, "pass_k 8 is above num_samples 4"),
        ({"temperature": 1, "num_samples": 4, "pass_k": [0]}, "greater than or equal to 1"),
        ({"num_samples": 2}, "num_samples 2 needs a temperature above 0"),
        ({"temperature": -1}, "greater than or equal to 0"),
        ({"temperature": float("inf")}, "finite"),
        ({"temperature": 0.005}, "vLLM would sample at 0.01; set at least that, or 0"),
        ({"top_k": 5}, "top_p, top_k and min_p need a temperature above 0"),
        ({"temperature": 1, "top_p": 0}, "greater than 0"),
        ({"temperature": 1, "min_p": 1.5}, "less than or equal to 1"),
        ({"num_samples": 0}, "greater than or equal to 1"),
        ({"max_prompts": 0}, "greater than or equal to 1"),
        ({"pass_at": 1}, "Extra inputs"),
    ],
)
def test_a_set_that_cannot_be_is_refused(settings: dict, message: str):
    with pytest.raises(ValidationError, match=re.escape(message)):
        EvalSetConfig(**settings)


def test_a_set_is_sampled_as_in_training_but_for_what_it_sets():
    training = SamplingConfig(temperature=0.7, max_tokens=9, stop=("x",))
    truncated = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}
    expected = training.model_copy(update=truncated)
    assert eval_sampling(EvalSetConfig(**truncated), training) == expected
    assert eval_sampling(EvalSetConfig(max_tokens=3), training) == SamplingConfig(
        temperature=0.0, max_tokens=3, stop=("x",)
    )


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    data = {"train": "t", "eval": {"gsm8k-test": "g", "aime": "a"}, "prompts_per_step": 8, "max_prompt_tokens": 100}
    config = {"model": "m", "data": data, "reward": {"scorers": [{"kind": "exact"}]}, "runs_dir": str(tmp_path)}
    config["rollout"] = {"max_model_len": 1200, "sampling": {"max_tokens": 50}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    return str(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evaluation.sets.gsm8k.temperature=1"], ["sets.gsm8k: data.eval has no gsm8k, only gsm8k-test, aime"]),
        (
            ["evaluation.sets.zzz.temperature=1", "data.eval=[]"],
            ["evaluation.sets.zzz: data.eval has no zzz, because it is empty"],
        ),
        (["evaluation.sets.aime.max_tokens=1101"], ["set aime = 1201", "rollout.max_model_len = 1200"]),
        (["evaluation.max_tokens=2000"], ["set gsm8k-test = 2100", "at least 2100"]),
        (["evaluation.eval_freq=1", "data.eval=[]"], ["evaluation.eval_freq", "data.eval names no file"]),
        (["evaluation.sets.aime.num_samples=4"], ["evaluation.sets.aime: num_samples 4", "command line"]),
    ],
)
def test_sets_and_sections_that_do_not_fit(run_yaml: str, overrides: list[str], words: list[str]):
    with pytest.raises(InvalidInput) as raised:
        load(Config, [run_yaml, *overrides])
    for word in words:
        assert word in raised.value.message


def test_a_reward_of_a_value_may_choose_the_best(run_yaml: str):
    args = [run_yaml, "evaluation.eval_freq=1", "evaluation.early_stopping=eval/aime/reward[a|b=x/y]"]
    assert load(Config, [*args, "data.metrics_column=a/b"]).data.metrics_column == "a/b"
    with pytest.raises(InvalidInput, match=r"only reward, tokens_mean, truncated, failed, exact, reward\[level=\.\.\."):
        load(Config, [*args, "data.metrics_column=level"])


def test_what_a_set_leaves_open_is_the_sections(run_yaml: str):
    aime = "evaluation.sets.aime={temperature: 0.6, num_samples: 32, pass_k: [1, 8], max_tokens: 1100}"
    evaluation = load(Config, [run_yaml, "evaluation.max_tokens=70", aime]).evaluation
    expected = EvalSetConfig(temperature=0.6, num_samples=32, pass_k=(1, 8), max_tokens=1100)
    assert evaluation.settings("aime") == expected
    assert evaluation.settings("gsm8k-test") == EvalSetConfig(max_tokens=70)
    assert load(Config, [run_yaml]).evaluation.settings("aime") == EvalSetConfig()
