"""The one config tree of a run. Each service reads its section; the coordinator reads all of it."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.common.config.advantage import AdvantageConfig
from services.common.config.base import Strict
from services.common.config.data import DataConfig
from services.common.config.evaluation import EvaluationConfig, check_evaluation
from services.common.config.megatron import MegatronConfig
from services.common.config.reward import RewardConfig
from services.common.config.rollout import RolloutConfig
from services.common.config.trainer import TrainerConfig
from services.common.layout import Layout, check_layout, data_parallel_size, samples_at_once


class CheckpointConfig(Strict):
    """When to save, what to keep."""

    save_freq: int = Field(default=0, ge=0)
    """Steps between checkpoints, 0 for none; the last step is saved too unless this is 0."""
    max_ckpts_to_keep: int = Field(default=3, ge=1)
    """Older checkpoints are deleted once a newer one is verified."""
    export_at_end: bool = True
    """Write the final policy as a Hugging Face model directory."""


class WeightsConfig(Strict):
    """Publication of weights from the trainer to the rollout replicas."""

    bucket_bytes: int = Field(default=512 << 20, ge=1 << 10)
    """Bytes of one broadcast."""
    timeout_s: float = Field(default=60.0, gt=0)
    """No member of the weight group waits longer for another before the epoch is aborted."""


class TimeoutsConfig(Strict):
    """Deadline of each kind of call, in seconds."""

    info_s: float = Field(default=10.0, gt=0)
    """GetInfo and other small questions."""
    open_s: float = Field(default=600.0, gt=0)
    """OpenRun: engines start, models load."""
    generate_s: float = Field(default=3600.0, gt=0)
    """One prompt group."""
    score_s: float = Field(default=300.0, gt=0)
    """One prompt group."""
    train_s: float = Field(default=3600.0, gt=0)
    """One batch, Forward or Train."""
    publish_s: float = Field(default=300.0, gt=0)
    """Joining a weight group, sending, receiving or committing."""
    checkpoint_s: float = Field(default=1800.0, gt=0)
    """Saving, loading or exporting."""


class Config(Strict):
    """A run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run's directory below runs_dir."""
    runs_dir: Path = Path("runs")
    """Where runs keep their files."""
    model: str
    """Model directory in the Hugging Face format, on the trainer's host."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of everything random: data order, sampling, initialisation."""
    num_steps: int = Field(default=100, ge=1)
    """Batches to train on; the policy version at the end."""
    resume: str = "auto"
    """auto: the newest verified checkpoint, else a fresh start; never; must; or the path of a checkpoint."""
    data: DataConfig
    """Prompts."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    reward: RewardConfig
    """Scoring."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Credit."""
    trainer: TrainerConfig = TrainerConfig()
    """Update."""
    weights: WeightsConfig = WeightsConfig()
    """Publication."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Deadlines."""

    @property
    def run_dir(self) -> Path:
        """Directory of this run's files."""
        return self.runs_dir / self.name

    @model_validator(mode="after")
    def _layout_is_legal(self) -> Self:  # first: the rules below count data-parallel ranks
        if self.trainer.strategy == "megatron":
            ranks, tokens = self.trainer.num_ranks, self.trainer.max_tokens_per_microbatch
            check_layout(self.trainer.megatron, ranks, max_tokens=tokens)
            if self.trainer.reference.megatron:
                key = "trainer.reference.megatron"
                check_layout(self.trainer.reference.megatron, ranks, max_tokens=tokens, key=key)
        return self

    @model_validator(mode="after")
    def _samples_divide(self) -> Self:
        groups, minibatches = self.data.prompts_per_step, self.trainer.num_minibatches
        if groups % minibatches:
            raise ValueError(
                f"data.prompts_per_step {groups} must be divisible by trainer.num_minibatches {minibatches}; "
                f"nearest: {max(1, round(groups / minibatches)) * minibatches}"
            )
        samples = groups // minibatches * self.rollout.completions_per_prompt
        if samples < samples_at_once(self.trainer):
            raise ValueError(
                f"a mini-batch has {samples} samples (prompts_per_step / num_minibatches * completions_per_prompt) "
                f"for {_ranks(self.trainer)}; {_needs(self.trainer)}"
            )
        samples, reference = samples * minibatches, self.trainer.reference.megatron
        if reference and samples < samples_at_once(self.trainer, reference):
            raise ValueError(
                f"a step has {samples} samples (prompts_per_step * completions_per_prompt) for the reference model's "
                f"{_ranks(self.trainer, reference)}; {_needs(self.trainer, reference)}"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        longest = self.data.max_prompt_tokens + self.rollout.sampling.max_tokens
        for key, limit in (
            ("rollout.max_model_len", self.rollout.max_model_len),
            ("trainer.max_tokens_per_microbatch", self.trainer.max_tokens_per_microbatch),
        ):
            if longest > limit:
                raise ValueError(
                    f"data.max_prompt_tokens + rollout.sampling.max_tokens = {longest} is above {key} = {limit}; "
                    f"raise {key} to at least {longest}"
                )
        return self

    @model_validator(mode="after")
    def _samples_split_evenly(self) -> Self:
        group, budget = self.rollout.completions_per_prompt, self.trainer.max_tokens_per_microbatch
        longest = self.data.max_prompt_tokens + self.rollout.sampling.max_tokens
        for megatron in filter(None, (self.trainer.megatron, self.trainer.reference.megatron)):
            padded = longest
            if self.trainer.strategy == "megatron":
                padded += -longest % Layout.of(megatron, self.trainer.num_ranks).align
            if group % samples_at_once(self.trainer, megatron) and budget < 2 * padded:
                raise ValueError(
                    f"rollout.completions_per_prompt {group} does not divide by {_ranks(self.trainer, megatron)}, so "
                    "long samples may spread unevenly: raise trainer.max_tokens_per_microbatch "
                    f"{budget} to at least {2 * padded}"
                )
        return self

    @model_validator(mode="after")
    def _group_has_a_baseline(self) -> Self:
        if self.rollout.completions_per_prompt < 2:
            raise ValueError(
                f"advantage.kind {self.advantage.kind} compares the samples of a prompt with each other: "
                "rollout.completions_per_prompt must be at least 2"
            )
        return self

    @model_validator(mode="after")
    def _samples_vary(self) -> Self:
        if not self.rollout.sampling.temperature > 0:
            raise ValueError("rollout.sampling.temperature must be above 0: greedy samples of a prompt are equal")
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> Self:
        check_evaluation(self.evaluation, self.data, self.rollout)
        return self


def _ranks(trainer: TrainerConfig, megatron: MegatronConfig | None = None) -> str:
    size = data_parallel_size(trainer, megatron)
    of_all = "" if size == trainer.num_ranks else f" (data-parallel size {size}: num_ranks / (TP x PP x CP))"
    stages = samples_at_once(trainer, megatron) // size
    return f"trainer.num_ranks {trainer.num_ranks}{of_all}" + (f" x PP {stages}, interleaved" if stages > 1 else "")


def _needs(trainer: TrainerConfig, megatron: MegatronConfig | None = None) -> str:
    stages = samples_at_once(trainer, megatron) // data_parallel_size(trainer, megatron)
    return f"every rank needs at least {'one' if stages == 1 else stages}"
