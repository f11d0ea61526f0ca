"""A run from its config to its end: checks what can be checked first, then services, then the loop."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.common.config.run import Config
from services.common.errors import PreconditionFailed
from services.common.model_card import read_model_card, write_model_card
from services.common.tasks import gather
from services.coordinator.clients.reward import Reward
from services.coordinator.clients.rollout import Rollout
from services.coordinator.clients.trainer import Model, Trainer
from services.coordinator.collect import Collector
from services.coordinator.data.curriculum import require_enough
from services.coordinator.data.prompts import PromptDataset, Prompts, load_eval
from services.coordinator.data.tokenizer import Tokenizer
from services.coordinator.forwards import Forwards
from services.coordinator.launch import Addresses, Fleet, launch
from services.coordinator.lifecycle import Outcome, export, log_to, stop_on_signal, unless_service_dies
from services.coordinator.loop import train
from services.coordinator.publication import Publisher
from services.coordinator.reporters import JsonLines, Reporter, TensorBoard, Terminal
from services.coordinator.resume import Start, open_run
from services.coordinator.run import Run
from services.coordinator.step import Parts


async def run_session(config: Config, given: Addresses, console: Console) -> Outcome:
    """Runs `config` to its end, or to a stop after Ctrl-C.

    Raises:
        LockstepError: As the first failure of any part.
    """
    dataset = None
    if Path(config.model).is_dir() or not given.trainer:
        read_model_card(config.model)
        dataset = _load_data(config, Path(config.model))
    start = open_run(config)
    run = Run(config, start)
    log_to(config.run_dir / "logs" / "coordinator.log", console)
    try:
        async with launch(config, given) as fleet:
            return await unless_service_dies(_drive(run, start, fleet, dataset, console), fleet)
    finally:
        run.close()


@dataclass(frozen=True)
class _Dataset:
    tokenizer: Tokenizer
    train: PromptDataset
    eval: dict[str, Prompts]


def _load_data(config: Config, model: Path) -> _Dataset:
    tokenizer = Tokenizer.load(model, chat_template=config.data.chat_template, date=config.data.template_date)
    train_data = PromptDataset.load(config.data, tokenizer, seed=config.seed)
    require_enough(len(train_data), config)
    return _Dataset(tokenizer, train_data, load_eval(config.data, tokenizer))


async def _drive(run: Run, start: Start, fleet: Fleet, dataset: _Dataset | None, console: Console) -> Outcome:
    config, addresses = run.config, fleet.addresses
    trainer, reward = Trainer(addresses.trainer, config), Reward(addresses.reward, config)
    beside = {name: Model(name, addresses.of(name), config) for name in config.models_beside}
    rollout = Rollout(addresses.rollout, config)
    console.print(f"run {run.run_id} in {config.run_dir}")
    replicas = ", ".join(addresses.rollout)
    console.print(f"opening trainer {addresses.trainer}, reward {addresses.reward}, rollout {replicas}", soft_wrap=True)
    try:
        version = await trainer.open(run.run_id, start.checkpoint)
        card = trainer.opened.model_card
        opens = [
            model.open(run.run_id, start.critic_checkpoint if name == "critic" else "")
            for name, model in beside.items()
            if name in config.models
        ]
        await gather([reward.open(run.run_id), rollout.open(run.run_id, card), *opens])
        _require_together(version, beside.get("critic"), config)
        if dataset is None:  # the model is on the trainer's host only
            directory = config.run_dir / "model_card"
            directory.mkdir(exist_ok=True)
            write_model_card(card, directory)
            dataset = _load_data(config, directory)
        run.begin(version, _reporters(config, version, console))
        collector = Collector(rollout, reward, dataset.tokenizer, config.seed)
        publisher = Publisher(trainer, rollout, run)
        stop_on_signal(run, console)
        forwards = Forwards(list(beside.values()), config)
        parts = Parts(dataset.train, dataset.eval, collector, trainer, publisher, forwards, beside.get("critic"))
        await train(run, parts, version)
        export_path = await export(run, trainer)
        return Outcome(run.version, run.evaluations(), export_path)
    finally:
        await gather([trainer.close(), reward.close(), rollout.close(), *(model.close() for model in beside.values())])


def _reporters(config: Config, version: int, console: Console) -> list[Reporter]:
    directory = config.run_dir
    files = [JsonLines(directory / "metrics.jsonl", version), TensorBoard(directory / "tensorboard", version)]
    return [Terminal(console, config.num_steps), *files]


def _require_together(version: int, critic: Model | None, config: Config) -> None:
    """A run that ended between the two updates of a step leaves the critic one ahead; the step is done again."""
    if critic is None or config.critic is None:
        return
    ahead = critic.opened.version - config.critic.warmup_steps - version
    if ahead > 1 or (ahead < 0 and version > 0):
        raise PreconditionFailed(
            f"the policy has {version} steps and the critic {version + ahead}: resume both from one checkpoint"
        )
