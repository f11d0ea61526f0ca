"""GRPO by hand: a training loop that calls the four services directly. Copy it to write an algorithm of your own.

    lockstep data arithmetic
    python deploy/by_hand.py deploy/runs/quickstart.yaml name=by-hand num_steps=3

It reads the same config as `lockstep run`, with rewards of 0 and 1 makes the same samples and weights to the last bit,
and records them, for `lockstep verify` and `report`. It leaves out what surrounds the algorithm there: evaluation,
checkpoints, export, and streaming of a batch to the trainer while it is sampled. Keys that would change samples or
weights and that it does not read are refused: advantages, selection, critic, reference, teacher, environment, lag.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp, SamplingParams

from services.common.config.advantage import AdvantageConfig, SelectionConfig
from services.common.config.load import load
from services.common.config.run import Config
from services.common.config.streaming import orders_by_length
from services.common.errors import InvalidInput
from services.common.tasks import gather
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.data.order import seed_of
from services.coordinator.data.prompts import Prompt
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.opening import Services, open_services
from services.coordinator.fleet.running import recorded_run, running_services
from services.coordinator.observe.reporters import files
from services.coordinator.rl.blocks import by_length
from services.coordinator.rl.metrics import batch_metrics
from services.coordinator.rl.publishing import Publisher
from services.coordinator.rl.sampling.collect import Collector, PromptRequest
from services.coordinator.rl.session import load_data
from services.coordinator.runs.record import CollectedBatch
from services.coordinator.runs.resume import differences
from services.coordinator.text.tokenizer import Tokenizer

OnStep = Callable[[PolicyStamp, pa.Table, Mapping[str, float]], None]
"""Gets, after each update, the stamp of the weights that sampled the batch, the batch, and the trainer's metrics."""


async def train(config: Config, on_step: OnStep, given: Addresses | None = None) -> PolicyStamp:
    """Trains for `config.num_steps` steps, and returns the stamp of the trained weights, which the replicas serve.

    Services of `given` are used where they run; the others are started on this host, and end with this function.
    """
    require_read(config)
    given = given or Addresses()
    data = load_data(config, given)
    assert data is not None, "this host has the model"
    async with (
        recorded_run(config, None) as run,  # makes the run's directory, with ledger.sqlite and the services' logs
        running_services(run, given) as addresses,
        open_services(run, addresses) as services,
    ):
        publisher = Publisher(services.trainer, services.rollout, run)
        first = services.trainer.opened.version  # 0, unless the run resumes from a checkpoint
        run.begin(first, files(run, first))
        collector = Collector(services.rollout, services.reward, data.tokenizer, config.seed)
        stamp = await publisher.publish(first)  # the engines start with random weights
        for step in range(first, config.num_steps):
            request = PromptRequest(config.rollout.completions_per_prompt, config.rollout.sampling, stamp, step)
            sampling = collector.params(request, request.sampling.max_tokens)  # all its keys, as a message
            groups = await gather(
                sample_and_score(config, services, data.tokenizer, (index, prompt), stamp, sampling)
                for index, prompt in enumerate(data.train.batch(step))
            )
            batch = with_advantages(to_batch(config, groups), config)
            collected = CollectedBatch(batch, step, stamp, {}, {}, data.train.digest, len(data.train), kl=None)
            run.record.record_batch(collected)  # {}: no group was selected, all of them are trained on
            # The id makes the call safe to repeat: the trainer applies a batch once, however often it arrives.
            version, metrics = await services.trainer.train(batch, run.batch_id(stamp.version), stamp)
            on_step(stamp, batch, metrics)
            # From here on no replica serves the old weights, so every sample is from the policy that it updates.
            stamp = await publisher.publish(version)
            of_update = {f"train/{name}": value for name, value in metrics.items()}
            run.finish_step(version, batch_metrics(batch) | of_update | run.clock.metrics())
    return stamp


def require_read(config: Config) -> None:
    """Raises InvalidInput for keys that this loop does not read although they change samples or weights."""
    lag, loss = config.trainer.lag, config.trainer.loss
    no_lag, no_kl = lag.model_copy(update={"versions": 0}), loss.model_copy(update={"kl_coef": 0.0})
    read = {
        "placement": "disaggregated",
        "selection": SelectionConfig(),
        "advantage": AdvantageConfig(eps=config.advantage.eps),
        "trainer": config.trainer.model_copy(update={"lag": no_lag, "loss": no_kl}),
        "evaluation": config.evaluation.model_copy(update={"early_stopping": None}),
        **dict.fromkeys(("environment", "critic", "teacher")),
    }
    if ignored := list(differences(config.model_dump(), config.model_copy(update=read).model_dump())):
        how = "which this loop does not read: leave it out, use `lockstep run`, or write it into the loop"
        raise InvalidInput(f"{', '.join(ignored)}, {how}", field=ignored[0])


async def sample_and_score(
    config: Config,
    services: Services,
    tokenizer: Tokenizer,
    numbered: tuple[int, Prompt],
    stamp: PolicyStamp,
    sampling: SamplingParams,
) -> ScoredGroup | None:
    """Samples one prompt from the weights of `stamp` and scores its completions, while others are still sampled.

    Returns None if a sample could not be scored and `reward.on_failure` drops its group.
    """
    index, prompt = numbered
    # Seeds that depend on nothing but these make a run repeatable, on any number of replicas.
    numbers = range(config.rollout.completions_per_prompt)
    seeds = [seed_of(config.seed, stamp.version, prompt.prompt_id, number) for number in numbers]
    group = await services.rollout.generate(index, prompt, seeds, sampling, stamp)
    return await services.reward.score(group, tokenizer)


def to_batch(config: Config, groups: Sequence[ScoredGroup | None]) -> pa.Table:
    """Returns a table with a row for each sample (SAMPLE_SCHEMA in services/common/batches.py)."""
    scored = [group for group in groups if group is not None]
    # The order changes nothing but rounding. This is the one in which a streamed batch is complete earliest.
    return to_table(sorted(scored, key=by_length) if orders_by_length(config) else scored)


def with_advantages(batch: pa.Table, config: Config) -> pa.Table:
    """Returns the batch with an advantage for every token: this is the algorithm, and the place for yours.

    GRPO compares the samples of a prompt with each other: (r - mean) / (std + eps), for all tokens of a sample.
    """
    rewards = batch["reward"].to_numpy().reshape(-1, config.rollout.completions_per_prompt)
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    advantages = centered / (rewards.std(axis=1, ddof=1, keepdims=True) + config.advantage.eps)
    lengths = [len(tokens) for tokens in batch["tokens"]]
    per_token = [np.full(length, one, np.float32) for length, one in zip(lengths, advantages.flat, strict=True)]
    column = batch.schema.get_field_index("advantages")
    return batch.set_column(column, batch.schema.field(column), pa.array(per_token, pa.list_(pa.float32())))


def show(stamp: PolicyStamp, batch: pa.Table, metrics: Mapping[str, float]) -> None:
    step, reward, norm = stamp.version + 1, np.mean(batch["reward"].to_numpy()), metrics["grad_norm"]
    sys.stdout.write(f"step {step}: reward {reward:.3f}, gradient norm {norm:.3f}, sampled from {stamp.digest}\n")


if __name__ == "__main__":
    trained = asyncio.run(train(load(Config, sys.argv[1:]), show))
    sys.stdout.write(f"trained weights: version {trained.version}, digest {trained.digest}\n")
