# What the tracker calls of wandb, which is an extra.
from collections.abc import Mapping

class Settings:
    def __init__(self, *, console: str) -> None: ...

class Run:
    def define_metric(self, name: str, *, step_metric: str | None = None) -> object: ...
    def log(self, data: Mapping[str, float]) -> None: ...
    def finish(self, exit_code: int | None = ...) -> None: ...

def init(
    *,
    project: str,
    entity: str | None,
    mode: str,
    id: str,
    resume: str,
    name: str,
    dir: str,
    config: Mapping[str, object],
    settings: Settings,
) -> Run: ...
