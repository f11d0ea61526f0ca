"""Runs a config: loads and checks the data, opens the services, then runs the training loop."""

import gc
import shlex
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from services.common.config.run import Config
from services.common.errors import PreconditionFailed
from services.coordinator.clients.trainer import Model
from services.coordinator.data import prompts
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.membership import following_replicas
from services.coordinator.fleet.opening import Services, finish, open_services, outcome_if_finished
from services.coordinator.fleet.probes import Tools, known_tools
from services.coordinator.fleet.running import Sessions, recorded_run
from services.coordinator.observe.frontend import Frontend, Outcome, show
from services.coordinator.observe.reporters import files
from services.coordinator.observe.terminal import LastSample
from services.coordinator.rl.advantages import require_importable
from services.coordinator.rl.blocks import BlockMaker
from services.coordinator.rl.evaluation import load_held_out
from services.coordinator.rl.loop import train
from services.coordinator.rl.publishing import make_publisher
from services.coordinator.rl.sampling.collect import check_words
from services.coordinator.rl.sampling.episodes import make_collector
from services.coordinator.rl.step import LoopContext
from services.coordinator.runs.checkpoints import warn_of_other_versions
from services.coordinator.runs.ledger import Kind
from services.coordinator.runs.run import Restarts, Run
from services.coordinator.text.tokenizer import Tokenizer

_FILES = {
    "metrics.jsonl, tensorboard/": "metrics of every step",
    "batches/": "every sample with tokens, rewards and policy stamp, as Parquet",
    "evaluations/": "the same of the held-out sets",
    "ledger.sqlite, logs/": "every decision with hashes of its inputs; the log of each service",
    "model/": "the trained model, for transformers or vLLM",
}


@dataclass(frozen=True)
class Dataset:
    tokenizer: Tokenizer
    tools: Tools | None
    """Schemas of the tools that every prompt shows; None if the prompts were read without knowing them."""
    train: prompts.PromptDataset
    eval: dict[str, prompts.Prompts]

    def other_digests(self, config: Config) -> dict[str, str]:
        """Returns the digests of what must not change in a run beside the training data, by name."""
        held_out = {f"data.eval.{name}": rows.digest for name, rows in self.eval.items()}
        # Without an environment, the rows show every change of the template that matters.
        return held_out | ({"the chat template": self.tokenizer.template_digest} if config.environment else {})


async def run_session(config: Config, external: Addresses, frontend: Frontend, data: Dataset | None = None) -> Outcome:
    """Runs `config` until all steps are done or the frontend stops the run.

    If a trainer that was started here dies, it is started again and the run resumes, as far as `restart` allows.
    Services that `external` does not name are started on this host. `data` is that of `load_data`, if it was called.

    Raises:
        LockstepError: The first failure of any part.
    """
    require_importable(config.advantage)
    frontend.start()
    async with Sessions(config, external) as sessions:
        loaded = data or load_data(config, external)
        while True:
            with sessions.repeating():
                async with recorded_run(sessions.config, frontend.console) as run:
                    if outcome := outcome_if_finished(run, frontend.say):
                        return outcome
                    if loaded and loaded.tools is not None:
                        run.record.require_same_data(loaded.train.digest, loaded.other_digests(config))
                    async with sessions.running_services(run) as addresses:
                        return await _run_once(run, addresses, sessions.restarts, frontend, loaded)


async def _run_once(
    run: Run, addresses: Addresses, restarts: Restarts, frontend: Frontend, data: Dataset | None
) -> Outcome:
    frontend.say(f"run {run.run_id} in {run.config.run_dir}")
    reward, rollout = ", ".join(addresses.reward), ", ".join(addresses.rollout)
    frontend.say(f"opening trainer {addresses.trainer}, reward {reward}, rollout {rollout}")
    async with open_services(run, addresses) as services, following_replicas(run, services.rollout, restarts):
        await run.record.ledger.free()
        context = _begin(run, services, data, frontend)
        gc.freeze()  # modules and prompts stay, and a collection would search all of them, which takes 0.3 s
        try:
            await train(run, context)
        finally:
            gc.unfreeze()
        return await finish(run, context.trainer)


def load_data(config: Config, external: Addresses) -> Dataset | None:
    """Reads the run's data. Returns None if only the trainer's host has the model, whose tokenizer is needed."""
    load = partial(_load, tools=known_tools(config, external))
    return prompts.load_if_local(config, load, model_is_remote=bool(external.trainer))


def show_outcome(outcome: Outcome, console: Console) -> None:
    show(outcome, _FILES, console, number=".3f")
    if outcome.is_stopped:
        return
    report = f"lockstep report {shlex.quote(str(outcome.directory))}"
    what = f"Next: `{report}`, or train your own model on your own data (see README.md)"
    console.print(what, soft_wrap=True, highlight=False)


def _load(config: Config, tokenizer: Tokenizer, *, tools: Tools | None) -> Dataset:
    check_words(tokenizer, config)
    shown, needs_answer = tokenizer.with_tools(tools or ()), config.reward.reads_answers
    train_data = prompts.PromptDataset.load(config.data, shown, seed=config.seed, needs_answer=needs_answer)
    train_data.prompts.require_used(config, "data.train")
    held_out = load_held_out(config, tokenizer, tools)
    prompts.require_enough(len(train_data), config)
    return Dataset(tokenizer, tools, train_data, held_out)


def _begin(run: Run, services: Services, data: Dataset | None, frontend: Frontend) -> LoopContext:
    """Begins the run after its newest finished step, after checking that the services hold the expected versions."""
    config, trainer, critic = run.config, services.trainer, services.auxiliary.get("critic")
    run.require_held(trainer.opened.version)
    version = run.last_finished(trainer.opened.version, trainer.opened.last_batch_id)
    _require_same_step(version, critic, config)
    if data is None or data.tools != services.tools:
        data = prompts.load_from_card(config, trainer.opened.model_card, partial(_load, tools=services.tools))
    run.record.use_data(data.train.digest, data.other_digests(config))
    opened = services.reward.opened
    evaluated = run.record.ledger.last(Kind.SCORED)
    warn_of_other_versions(run.record.newest_batch(), opened.scorer, opened.environment, evaluated)
    frontend.say(run.describe_start(version, trainer.opened.version))
    written = files(run, version)  # before the frontend reads them: this repairs what an earlier session has left
    shown = frontend.begin(run, version)
    freq = config.observability.sample_freq
    samples = [LastSample(config.run_dir, data.tokenizer.decode, shown, freq)] if freq else []
    run.clock.lanes |= {"generate": services.rollout.busy, "score": services.reward.busy, "train": trainer.busy}
    run.begin(version, [*written, *samples, shown])
    return LoopContext(
        data=data.train,
        eval_data=data.eval,
        collector=make_collector(services, data.tokenizer, config),
        trainer=trainer,
        publisher=make_publisher(services, run),
        block_maker=BlockMaker(list(services.auxiliary.values()), config, services.rollout.lengths),
        versions={"scorer": opened.scorer, "environment": opened.environment},
        critic=critic,
    )


def _require_same_step(version: int, critic: Model | None, config: Config) -> None:
    """Checks that the critic has the finished step `version`, or is one step ahead if the run ended in an update."""
    if critic is None or config.critic is None:
        return
    ahead = critic.opened.version - config.critic.warmup_steps - version
    if ahead > 1 or (ahead < 0 and version > 0):
        raise PreconditionFailed(
            f"the policy has {version} steps and the critic {version + ahead}: resume both from one checkpoint"
        )
