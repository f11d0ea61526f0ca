"""Runs `lockstep replay`, as a run without steps in a directory of its own: trains policy and critic again on the
recorded batches, from the newest checkpoint before a step.
"""

import asyncio
import datetime
import json
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp
from rich.console import Console

from services.common.config.advantage import AdvantageConfig
from services.common.config.run import Config
from services.common.config.trainer import ReferenceConfig
from services.common.errors import InvalidInput, counted
from services.coordinator.clients.environment import Environments, open_environments
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.trainer import Model, Trainer
from services.coordinator.data.prompts import MODEL_CARD, PromptDataset
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.opening import close_run
from services.coordinator.fleet.running import recorded_run, running_services
from services.coordinator.replay.record import Batch, Difference, Record, compare
from services.coordinator.replay.rewards import replay_calls, replay_environment, replay_rewards
from services.coordinator.rl.metrics import batch_metrics
from services.coordinator.rl.publishing import weight_group
from services.coordinator.rl.sampling.episodes import make_dialog
from services.coordinator.runs.database import reading
from services.coordinator.runs.resume import CRITIC_CHECKPOINTS, open_run, require_own_paths
from services.coordinator.runs.run import Run
from services.coordinator.text.tokenizer import Tokenizer


async def replay_training(
    run: Run, record: Record, step: int, trainer: Trainer, say: Callable[[str], None]
) -> tuple[int, list[Difference]]:
    """Trains all versions up to `step` again. Returns the number of values compared and the differences.

    Compares the weights of every version by their content digest, and the metrics of `step`.
    """
    version = await trainer.open(run.run_id, run.resume_from)
    # Publishes to a group without receivers, to get a stamp of the weights, which training requires.
    epoch = run.record.next_epoch(0)
    await trainer.join(weight_group(run, trainer.opened, epoch, 0))
    stamp, differences, compared = await trainer.send(epoch, version), [], 0
    while True:
        if digest := record.digest(version):
            compared += 1
            name = f"weights of version {version}"
            differences += compare({name: digest}, {name: stamp.digest})
        if version == step:
            return compared, differences
        batch = record.batch(version + 1)
        differences += batch.differences
        say(f"training on the batch of step {version + 1}")
        version, metrics = await trainer.train(_with_stamp(stamp, batch), run.batch_id(stamp.version), stamp)
        stamp = await trainer.send(epoch, version)
        if version == step:
            now = batch_metrics(batch.samples) | {f"train/{name}": value for name, value in metrics.items()}
            now = {name: value for name, value in now.items() if not name.endswith("_s")}  # without timings
            compared += len(now)
            differences += compare(record.metrics(step), now)


def _with_stamp(stamp: PolicyStamp, batch: Batch) -> pa.Table:
    """Returns the samples with `stamp`, which the trainer requires; the recorded stamp is another if weights differ."""
    samples = batch.samples
    for name, value in (("policy_version", stamp.version), ("policy_digest", stamp.digest)):
        index = samples.schema.get_field_index(name)
        field = samples.schema.field(index)
        samples = samples.set_column(index, field, pa.array([value] * samples.num_rows, field.type))
    return samples


# Suffix of a checkpoint's tensor files. Its other files contain random names, so they cannot be compared.
_TENSORS = ".distcp"


async def replay_critic(
    run: Run, record: Record, step: int, critic: Model, say: Callable[[str], None]
) -> tuple[int, list[Difference]]:
    """Trains the critic of `step` again. Returns the number of values compared and the differences.

    Compares the metrics of every step from the checkpoint on and, if the run kept the critic's checkpoint of `step`,
    the final weights and optimizer state.
    """
    assert run.config.critic
    start, warmup_steps = record.critic_start(step - 1), run.config.critic.warmup_steps
    assert start, "the caller has checked"
    await critic.open(run.run_id, start[1])
    differences, compared = [], 0
    for version in range(start[0], step):
        batch = record.batch(version + 1)
        differences += batch.differences
        say(f"training the critic on the batch of step {version + 1}")
        sampled_from = batch.samples.slice(0, 1).to_pylist()[0]
        stamp = PolicyStamp(version=sampled_from["policy_version"], digest=sampled_from["policy_digest"])
        _, metrics = await critic.train(batch.samples, run.batch_id(stamp.version), stamp, version + warmup_steps)
        now = {f"train/{name}": value for name, value in metrics.items()}
        compared += len(now)
        differences += compare(record.metrics(version + 1), now, f"step {version + 1}: ")
    if recorded := record.critic_checkpoint(step):
        now = await _tensors_now(run, critic, step, step + warmup_steps)
        compared += len(now)
        differences += compare(_tensors(recorded), now, "critic's checkpoint: ")
    return compared, differences


async def _tensors_now(run: Run, critic: Model, step: int, version: int) -> dict[str, str]:
    path = (run.config.run_dir / CRITIC_CHECKPOINTS / f"step-{step:06d}").absolute()
    await critic.save(str(path), version)
    try:
        return _tensors(path)
    finally:
        await asyncio.to_thread(shutil.rmtree, path)


def _tensors(checkpoint: Path) -> dict[str, str]:
    files = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["files"]
    return {name: about["sha256"] for name, about in files.items() if name.endswith(_TENSORS)}


class What(StrEnum):
    REWARDS = "rewards"
    TRAIN = "train"
    ENVIRONMENT = "environment"
    CALLS = "calls"


def parse_what(text: str) -> list[What]:
    """Returns the part named in `text`; rewards and training if it is empty."""
    if text and text not in list(What):
        raise InvalidInput(f"--what {text}: must be rewards, train, environment or calls", field="what")
    return [What(text)] if text else [What.REWARDS, What.TRAIN]


_SERVICES = {What.REWARDS: "reward", What.TRAIN: "trainer", What.ENVIRONMENT: "reward"}


@dataclass(frozen=True)
class Replayed:
    """The result of a replay. `compared` has a line of text for each comparison."""

    step: int
    compared: Sequence[str]
    differences: Sequence[Difference]
    directory: Path


async def replay_session(
    run_dir: Path, step: int, what: Collection[What], external: Addresses, console: Console
) -> Replayed:
    """Repeats `step` of a run. The run's own files are not changed.

    Raises:
        NotFound: There is no run or no such step, samples or checkpoints that it needs were not kept, or the run's
            model or data are relative to another directory.
        PreconditionFailed: The run's config or data were changed.
        DataLoss: A checkpoint is not the one that was saved.
        LockstepError: The first failure of a service.
    """
    with closing(Record(run_dir)) as record:
        external.require_own(record.config)
        record.require_step(step)
        record.batch(step)  # raises if it was not kept, before any service starts
        first, checkpoint = record.start(step - 1) if What.TRAIN in what else (step, "")
        for before in range(first + 1, step):  # training repeats these steps too
            record.require_batch(before)
        recorded = record.config_of(step)
        has_critic = What.TRAIN in what and recorded.critic and record.critic_start(step - 1)
        _require_own_paths(record.run_dir, recorded, what, external)
        session = _Session(record, step, what, console)
        config = _config(recorded, record.run_dir, step, checkpoint)
        start = open_run(config)  # without the critic, whose checkpoint may be of another step than the policy's
        if has_critic:
            config = config.model_copy(update={"critic": recorded.critic})
        services = [_SERVICES[part] for part in what if part in _SERVICES]
        async with (
            recorded_run(config, console, start) as run,
            running_services(run, external, services=services, sharing=recorded) as addresses,
        ):
            return await session.run(run, addresses)


def _require_own_paths(run_dir: Path, recorded: Config, what: Collection[What], external: Addresses) -> None:
    """Raises NotFound if the parts `what` need a path that is relative to the directory where the run was started."""
    reads_text = any(part is not What.TRAIN for part in what) and not (run_dir / MODEL_CARD).is_dir()
    needs_model = reads_text or (What.TRAIN in what and not external.trainer)
    needs_data = What.REWARDS in what or What.ENVIRONMENT in what
    paths = [("model", Path(recorded.model))] if needs_model else []
    paths += [("data.train", path) for path in recorded.data.train if needs_data]
    for key, path in paths:
        require_own_paths(str(run_dir / "config.json"), {key: path}, None)


def show_replayed(replayed: Replayed, console: Console) -> None:
    for line in replayed.compared:
        console.print(line, soft_wrap=True, highlight=False)
    if not replayed.differences:
        console.print(f"step {replayed.step}: identical to the record", style="green", highlight=False)
        return
    for difference in replayed.differences:
        line = f"{difference.what}: recorded {difference.recorded}, now {difference.now}"
        console.print(line, soft_wrap=True, highlight=False)
    total = counted(len(replayed.differences), "difference")
    console.print(f"step {replayed.step}: {total}", style="red", highlight=False)
    console.print(f"logs in {replayed.directory / 'logs'}", soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class _Session:
    record: Record
    step: int
    what: Collection[What]
    console: Console

    async def run(self, run: Run, addresses: Addresses) -> Replayed:
        differences, compared = dict.fromkeys(self.record.batch(self.step).differences), list[str]()

        def add(what: str, unit: str, number: int, own: Sequence[Difference]) -> None:
            compared.append(f"{what} {counted(number, unit)}: {f'{len(own)} differ' if own else 'all equal'}")
            differences.update(dict.fromkeys(own))

        if What.REWARDS in self.what:
            self._print(f"scoring the samples of step {self.step}")
            add("rewards of", "sample", *await self._rewards(run, addresses))
        if What.CALLS in self.what:
            self._print(f"mapping the calls of step {self.step} to tokens")
            add("tokens of", "call", *await self._calls(run.config))
        if What.ENVIRONMENT in self.what:
            self._print(f"playing the turns of step {self.step} to the environment")
            add("replies to", "turn", *await self._environment(run, addresses))
        if What.TRAIN in self.what:
            self._print(f"opening the trainer with {run.resume_from or run.config.model}")
            trainer = Trainer(addresses.trainer, run.config, addresses.transport)
            async with _closing(trainer):
                replayed = await replay_training(run, self.record, self.step, trainer, self._print)
            add("weights and metrics,", "value", *replayed)
        if What.TRAIN in self.what and run.config.critic:
            critic = Model("critic", addresses.of("critic"), run.config, addresses.transport)
            async with _closing(critic):
                replayed = await replay_critic(run, self.record, self.step, critic, self._print)
            add("critic's weights and metrics,", "value", *replayed)
        elif What.TRAIN in self.what and self.record.config.critic:
            compared.append("critic: not trained again, because it has no checkpoint before this step")
        await close_run(run, addresses)
        return Replayed(self.step, compared, list(differences), run.config.run_dir)

    async def _rewards(self, run: Run, addresses: Addresses) -> tuple[int, list[Difference]]:
        episodes, damaged = self.record.episodes(self.step) if _has_agent(run.config) else ([], ())
        async with self._scoring(run, addresses) as (rewards, environments, tokenizer):
            data = _prompts(run.config, tokenizer, environments)
            batch = self.record.batch(self.step)
            number, differences = await replay_rewards(batch, rewards, data, tokenizer, episodes)
            return number, [*damaged, *differences]

    async def _calls(self, config: Config) -> tuple[int, list[Difference]]:
        if not _has_agent(config):
            raise InvalidInput("--what calls: the run has no agent", field="what")
        episodes, damaged = self.record.episodes(self.step)
        samples, tokenizer = self.record.batch(self.step).samples, self._tokenizer(config)
        with reading(f"{self.record.run_dir}: a call of step {self.step}"):
            number, differences = await asyncio.to_thread(replay_calls, samples, episodes, tokenizer, config)
        return number, [*damaged, *differences]

    async def _environment(self, run: Run, addresses: Addresses) -> tuple[int, list[Difference]]:
        config = run.config
        if config.environment is None:
            raise InvalidInput("--what environment: the run has no environment", field="what")
        if _has_agent(config):
            message = "--what environment: an agent is another program, and is not played again; use --what calls"
            raise InvalidInput(message, field="what")
        async with self._scoring(run, addresses) as (_, environments, tokenizer):
            assert environments, "the run has an environment"
            data = _prompts(config, tokenizer, environments)
            dialog = make_dialog(tokenizer, environments, config)
            return await replay_environment(self.record.batch(self.step), environments, data, dialog, config)

    @asynccontextmanager
    async def _scoring(
        self, run: Run, addresses: Addresses
    ) -> AsyncIterator[tuple[Rewards, Environments | None, Tokenizer]]:
        """Yields the opened reward services, their environment if the run has one, and the tokenizer.

        An agent is not opened: its files and programs may be gone.
        """
        tokenizer, config = self._tokenizer(run.config), run.config
        config = config.model_copy(update={"environment": None}) if _has_agent(config) else config
        rewards = Rewards(addresses.reward, config, addresses.transport)
        async with _closing(rewards):
            await rewards.open(run.run_id)
            async with open_environments(rewards, config, addresses.transport) as environments:
                yield rewards, environments, tokenizer

    def _tokenizer(self, config: Config) -> Tokenizer:
        # If the model is on another host, the trainer has sent the card with its tokenizer.
        model, card = Path(config.model), self.record.run_dir / MODEL_CARD
        folder = card if card.is_dir() and not model.is_dir() else model
        return Tokenizer.load(folder, chat_template=config.data.chat_template, date=config.data.template_date)

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False)


@asynccontextmanager
async def _closing(client: Model | Rewards) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await client.close()


def _config(recorded: Config, run_dir: Path, step: int, checkpoint: str) -> Config:
    """Returns `recorded` with a directory of its own and without other models, whose outputs the batch has."""
    advantage = recorded.advantage.model_copy(update={"kl": AdvantageConfig().kl})  # its kind decides about blocks
    alone = {"reference": ReferenceConfig(), "critic": None, "teacher": None, "advantage": advantage}
    here = {
        "runs_dir": run_dir / "replay",
        "name": f"step-{step:06d}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}",
        "resume": checkpoint or "never",
        "trace": False,
    }
    return recorded.model_copy(update=alone | here)


def _prompts(config: Config, tokenizer: Tokenizer, environments: Environments | None) -> PromptDataset:
    shown = tokenizer.with_tools(environments.tools) if environments else tokenizer
    needs_answer = config.reward.reads_answers
    return PromptDataset.load(config.data, shown, seed=config.seed, needs_answer=needs_answer)


def _has_agent(config: Config) -> bool:
    return config.environment is not None and config.environment.kind == "agent"
