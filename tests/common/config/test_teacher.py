"""Rules of distillation: every error names the keys, and the nearest configs that keep the rule are accepted."""

from pathlib import Path

import pytest
import yaml

from services.common.config.load import load
from services.common.config.run import Config
from tests.common.config.smallest import SMALLEST, refused, write

TEACHER = ["teacher.model=t"]
LONG = ["rollout.max_model_len=16000", "trainer.max_tokens_per_microbatch=16000"]
# Overrides that break one rule, what the error must name, and the nearest legal overrides.
RULES = {
    "distillation needs a teacher": (
        ["advantage.kind=distill"],
        [
            "advantage.kind distill, advantage.distill_coef and trainer.loss.distill.coef need a teacher",
            "teacher.model",
        ],
        ["advantage.kind=distill", *TEACHER],
    ),
    "a teacher is of use": (TEACHER, ["nothing else uses one"], [*TEACHER, "advantage.distill_coef=0.5"]),
    "a divergence in the loss needs a teacher": (
        ["trainer.loss.distill.coef=0.5"],
        ["trainer.loss.distill.coef need a teacher", "teacher.model"],
        ["trainer.loss.distill.coef=0.5", *TEACHER],
    ),
    "distillation is of use": (
        ["advantage={kind: distill, distill_coef: 0}", *TEACHER],
        ["advantage.distill_coef 0 distills nothing", "trainer.loss.distill.coef"],
        ["advantage={kind: distill, distill_coef: 0}", "trainer.loss.distill.coef=1", *TEACHER],
    ),
    "a coefficient of 0 beside a reward": (
        ["advantage.distill_coef=0"],
        ["advantage.distill_coef 0 distills nothing: leave it out"],
        ["advantage.distill_coef=0", "trainer.loss.distill.coef=1", *TEACHER],
    ),
    "one divergence, or two on purpose": (
        ["advantage.kind=distill", "trainer.loss.distill.coef=1", *TEACHER],
        ["would both descend", "advantage.distill_coef to 0"],
        ["advantage={kind: distill, distill_coef: 1}", "trainer.loss.distill.coef=1", *TEACHER],
    ),
    "keys of a divergence that is off": (
        ["trainer.loss.distill.top_k=8"],
        ["distill.top_k has no effect while distill.coef is 0"],
        ["trainer.loss.distill={coef: 1, top_k: 8, kl: forward}", *TEACHER],
    ),
    "the teacher's tokens of a sample fit a message": (
        ["trainer.loss.distill={coef: 1, top_k: 4096}", "rollout.sampling.max_tokens=8000", *TEACHER, *LONG],
        ["top_k 4096 makes 250.0 MiB of a sample of 8000 tokens", "at most 2096", "lower rollout.sampling.max_tokens"],
        ["trainer.loss.distill={coef: 1, top_k: 2096}", "rollout.sampling.max_tokens=8000", *TEACHER, *LONG],
    ),
    "a teacher is another model": (
        ["advantage.kind=distill", "teacher={}"],
        ["teacher", "model: name the teacher's model"],
        ["advantage.kind=distill", *TEACHER],
    ),
    "a loss without advantages distills nothing": (
        ["advantage.kind=distill", *TEACHER, "trainer.loss.kind=sft"],
        ["trainer.loss.kind sft reads no advantages"],
        ["advantage.kind=distill", *TEACHER, "trainer.loss.kind=reinforce"],
    ),
    "no penalty on a reward that is not read": (
        ["advantage={kind: distill, kl: {coef: 0.1}}", *TEACHER],
        ["kl.coef is a penalty on the reward", "trainer.loss.kl_coef"],
        ["advantage.kind=distill", *TEACHER, "trainer.loss.kl_coef=0.1"],
    ),
    "no whitening of a reward that is not read": (
        ["advantage={kind: distill, whiten: group}", *TEACHER],
        ["whiten normalizes the reward's advantage"],
        ["advantage={kind: grpo, distill_coef: 1, whiten: group}", *TEACHER],
    ),
    "dynamic sampling needs rewards": (
        ["advantage.kind=distill", *TEACHER, "reward.scorers=[]", "selection.dynamic.enabled=true"],
        ["selection.dynamic compares rewards"],
        ["advantage.kind=distill", *TEACHER, "reward.scorers=[]"],
    ),
    "a colocated teacher shares the trainer's ranks": (
        ["placement=colocated", "trainer.num_ranks=1", "advantage.kind=distill", *TEACHER, "teacher.deployment=own"],
        ["teacher.deployment own needs GPUs of its own"],
        ["placement=colocated", "trainer.num_ranks=1", "advantage.kind=distill", *TEACHER],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(tmp_path: Path, rule: str) -> None:
    wrong, words, right = RULES[rule]
    file = write(tmp_path, "run.yaml", yaml.safe_dump(SMALLEST))
    message = refused(file, *wrong)
    assert all(word in message for word in words), message
    load(Config, [file, *right])


def test_one_sample_of_a_prompt_is_enough(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", yaml.safe_dump(SMALLEST))
    config = load(Config, [file, *TEACHER, "advantage.kind=distill", "rollout.completions_per_prompt=1"])
    assert config.auxiliary_roles == ("teacher",) and config.advantage.teacher_coef == 1
    beside = load(Config, [file, *TEACHER, "advantage.distill_coef=0.5", "trainer.num_minibatches=4"])
    assert (beside.advantage.teacher_coef, beside.models["teacher"].num_minibatches) == (0.5, 1)
