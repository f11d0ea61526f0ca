"""Reports to Weights & Biases."""

import json

from services.common.config.load import AnyConfig
from services.common.config.observability import WandbConfig
from services.coordinator.runs.reporter import Ending, Reporter
from services.coordinator.runs.run import Run

# It may have to upload what the network did not take during the run.
_CLOSE_TIMEOUT_S = 60.0
_EXIT_CODES = {Ending.FAILED: 1, Ending.INTERRUPTED: 130}


class Wandb(Reporter):
    """Logs metrics by step. wandb sends them from its own process and keeps them if the network is down."""

    def __init__(self, settings: WandbConfig, run: Run[AnyConfig]):
        import wandb

        self._exit_code: int | None = None
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            id=run.run_id,
            resume="allow",  # the same id continues the same run
            name=run.config.name,
            dir=str(run.config.run_dir),
            config=json.loads(run.config.model_dump_json()),
            settings=wandb.Settings(console="off"),  # the terminal's live table must not be captured as a log
        )
        # wandb's own step cannot go back, but a resumed run repeats its last steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": version, **metrics})

    evaluation = step

    def note_ending(self, ending: Ending) -> None:
        self._exit_code = _EXIT_CODES.get(ending)

    def close(self) -> None:
        if self._exit_code is None:
            self._run.finish()
        else:
            self._run.finish(exit_code=self._exit_code)
