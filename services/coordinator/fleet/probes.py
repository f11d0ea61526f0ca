"""Starts the checks of services.*.probe, each in a process of its own with a deadline, and reads their answers.

A run also asks its environment in this way for its tools, before any service starts: every prompt is sent with their
schemas.
"""

import functools
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from google.protobuf.json_format import MessageToDict, ParseDict
from lockstep.reward.v1.agent_pb2 import PlayRequest, PlayResponse

from services.common.config.environment import AgentEnvironmentConfig, BaseEnvironmentConfig
from services.common.config.run import Config
from services.common.config.trainer import TrainerConfig
from services.common.errors import DeadlineExceeded, InvalidInput, LockstepError, PreconditionFailed
from services.common.json_values import JsonMapping
from services.coordinator.fleet.launch import Addresses

Tools = Sequence[Mapping[str, object]]
"""JSON schemas, as chat templates take them."""
Answer = JsonMapping

SANDBOX, SCORERS, ENVIRONMENT, AGENT = (
    ("-m", "services.reward.probe", name) for name in ("sandbox", "scorers", "environment", "agent")
)
ENGINE, FUNCTIONS = ("-m", "services.rollout.probe", "engine"), ("-m", "services.common.probe", "functions")
MODEL = ("-m", "services.trainer.probe", "model")
OPEN_TIMEOUT_S = 300.0
"""Time limit for opening an environment, which may import torch or index a corpus."""
# The trainer's proof of a model takes seconds; importing torch and transformers on a slow disk takes longer.
_MODEL_TIMEOUT_S = 300.0
# An environment limits its replies itself. The process may take this much longer.
_MARGIN_S = 30.0

_log = logging.getLogger(__name__)


class Probe:
    """A check in a process of its own, to be used as a context manager. What it tries may hang, or end the process."""

    def __init__(self, command: Sequence[str], *, end_s: float = _MARGIN_S, shows_errors: bool = False):
        """`command` has the arguments of Python, which is killed if it does not end `end_s` after its input."""
        self._command, self._end_s, self._shows_errors = command, end_s, shows_errors
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._errors = None if self._shows_errors else self._stack.enter_context(tempfile.TemporaryFile())
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen([sys.executable, *self._command], **pipes)
        return self

    def ask(self, request: object, timeout_s: float) -> Answer:
        """Sends a request and returns the answer.

        Raises:
            DeadlineExceeded: There was none in time.
            PreconditionFailed: The check has failed, and says why; or its process ended.
        """
        assert self._process.stdin and self._process.stdout, "they are pipes"
        began = time.monotonic()
        deadline = threading.Timer(timeout_s, self._process.kill)  # readline has no limit, but ends with the process
        deadline.start()
        try:
            with suppress(BrokenPipeError):  # it may have ended, also with an answer
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:  # also after Ctrl-C: this process would not end before a timer that still runs
            deadline.cancel()
        if not line and time.monotonic() - began >= timeout_s:
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s")
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise PreconditionFailed(answer["error"], field=answer.get("field") or "")
        return answer

    def _last_words(self) -> str:
        if self._errors is None:
            return "see above"
        self._process.wait(self._end_s)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the probe failed without a message"

    def __exit__(self, *_: object) -> None:
        with self._stack, self._process:
            assert self._process.stdin, "it is a pipe"
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(self._end_s)
            except subprocess.TimeoutExpired:
                self._process.kill()


class EnvironmentProbe(Probe):
    """An environment, opened to play episodes of it without a reward service."""

    def __init__(
        self, environment: BaseEnvironmentConfig, command: Sequence[str] = ENVIRONMENT, *, shows_errors: bool = False
    ):
        super().__init__(command, end_s=environment.turn_s + _MARGIN_S, shows_errors=shows_errors)
        self._environment = environment

    def open(self, timeout_s: float = OPEN_TIMEOUT_S) -> Answer:
        """Returns the environment's version and tools."""
        return self.ask({"environment": self._environment.model_dump(mode="json")}, timeout_s)

    def play(self, call: Mapping[str, object]) -> Answer:
        """Returns the reply to a reset or a step; one with `failure` if the environment failed."""
        return self.ask(call, self._environment.longest_reply_s + _MARGIN_S)


class AgentProbe(Probe):
    """An agent, opened to play one episode of it without a reward service. The caller is its model.

    `place` has the `host` at which an agent elsewhere finds it, and `tls`, a directory with credentials, if any.
    """

    def __init__(
        self, environment: AgentEnvironmentConfig, place: Mapping[str, str] | None = None, *, shows_errors: bool = False
    ):
        super().__init__(AGENT, shows_errors=shows_errors)
        self._environment, self._place = environment, place

    def open(self) -> Answer:
        """Returns the version of the agent."""
        opening = {"environment": self._environment.model_dump(mode="json"), "place": self._place}
        return self.ask(opening, OPEN_TIMEOUT_S)

    def play(self, request: PlayRequest) -> PlayResponse:
        """Begins the episode, or answers a call. Returns the next call, the end or the failure."""
        said = MessageToDict(request, preserving_proto_field_name=True)
        return ParseDict(dict(self.ask(said, self._environment.episode_s + _MARGIN_S)), PlayResponse())


def problem(command: Sequence[str], request: object, timeout_s: float) -> str:
    """Returns what a check that answers once finds wrong; "" if nothing."""
    try:
        with Probe(command) as probe:
            probe.ask(request, timeout_s)
    except LockstepError as error:
        return error.message
    return ""


def describe_model(directory: str, trainer: TrainerConfig) -> Answer:
    """Asks the trainer's code, in a process with torch, whether it would train the model in a directory of this host.

    Returns its sizes with strategy fsdp, and nothing with megatron. An answer is kept.

    Raises:
        InvalidInput: The trainer would refuse it, and says why.
    """
    sections = ("megatron",) if trainer.strategy == "megatron" else ()
    kept = {name: getattr(trainer, name) for name in ("strategy", "lora", "compute_dtype", *sections)}
    settings = TrainerConfig(**kept).model_dump_json()
    return _described(directory, settings, (Path(directory) / "config.json").read_bytes())


@functools.lru_cache(maxsize=8)
def _described(directory: str, settings: str, content: bytes) -> Answer:
    try:
        with Probe(MODEL) as probe:
            return probe.ask({"model": directory, "config": settings}, _MODEL_TIMEOUT_S)
    except LockstepError as error:
        raise InvalidInput(error.message, field=error.metadata.get("field") or "model") from error


def known_tools(config: Config, addresses: Addresses) -> Tools | None:
    """Returns the tools that prompts will show.

    None if this host cannot tell, because another host has the environment or it does not open. A run that starts asks
    its reward service again, and its prompts are then read with the tools that it really has.
    """
    environment = config.environment
    if environment is None or environment.kind != "tools" or environment.syntax == "tags":
        return []
    if addresses.reward:
        return None
    try:
        with EnvironmentProbe(environment) as probe:
            return probe.open()["tools"]
    except DeadlineExceeded:
        _log.warning("environment: it did not open within %g s; prompts are measured without its tools", OPEN_TIMEOUT_S)
    except PreconditionFailed:
        pass  # it will fail in the same way in the reward service, which says why
    return None
