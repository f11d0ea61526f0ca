"""Tests rewards by the values of a column, and which columns are refused."""

import pytest
from lockstep.reward.v1.reward_pb2 import Score
from lockstep.types.v1.types_pb2 import Completion, PolicyStamp
from pydantic import ValidationError

from services.common.config.data import DataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.groups import ScoredGroup, rewards_by_column
from services.coordinator.data.prompts import Prompt, PromptDataset, load_eval
from tests.support import raises


def group(index: int, rewards: list[float], **extra: object) -> ScoredGroup:
    prompt = Prompt(f"p{index}", "text", (5,), "1", dict(extra), (), "text")
    scores = [Score(reward=reward) for reward in rewards]
    return ScoredGroup(index, prompt, [Completion()] * len(rewards), PolicyStamp(), scores=scores, scorer="s")


def test_each_sample_counts_once_for_its_value() -> None:
    groups = [group(0, [1.0, 0.0], task="sum"), group(1, [1.0], task="a/b"), group(2, [1.0, 1.0], task="sum")]
    assert rewards_by_column(groups, "task") == {"reward[task=a|b]": 1.0, "reward[task=sum]": 0.75}
    assert rewards_by_column([group(0, [1.0], **{"a/reward": "x/reward"})], "a/reward") == {
        "reward[a|reward=x|reward]": 1.0  # and not the reward of a set, whose name ends with /reward
    }
    assert rewards_by_column(groups, None) == {}
    assert rewards_by_column([group(0, [0.5], level=None)], "level") == {"reward[level=None]": 0.5}


def config(path: object, **keys: object) -> DataConfig:
    return DataConfig.model_validate({"train": path, "prompts_per_step": 1} | keys)


def test_columns_that_make_no_metrics_are_refused(tokenizer, write_parquet) -> None:
    rows = {"prompt": [str(n) for n in range(60)], "answer": ["1"] * 60}
    path = write_parquet(**rows, task=["a", "b"] * 30, number=list(range(60)), share=[0.5] * 60)
    dataset = PromptDataset.load(config(path, metrics_column="task"), tokenizer, seed=0)
    assert dataset.prompts[1].extra["task"] == "b"
    for column, field in (("number", "data.metrics_column"), ("share", "data.train"), ("none", "data.metrics_column")):
        with raises(InvalidInput, field=field):
            PromptDataset.load(config(path, metrics_column=column), tokenizer, seed=0)
    path_of_two = write_parquet("two.parquet", **rows, task=["a/b", "a|b"] * 30)
    with raises(InvalidInput, field="data.metrics_column"):
        PromptDataset.load(config(path_of_two, metrics_column="task"), tokenizer, seed=0)
    with raises(InvalidInput, field="data.metrics_column"):
        load_eval(config(path, eval={"all": path}, metrics_column="number"), tokenizer)
    for wrong in ({"metrics_column": "task", "extra_columns": ["level"]}, {"metrics_column": "answer"}):
        with pytest.raises(ValidationError, match="metrics_column"):
            config(path, **wrong)
