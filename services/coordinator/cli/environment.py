"""Plays an episode of a run's environment without a model, for `lockstep env try`."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console

from services.common.config.environment import AgentEnvironmentConfig, TurnsConfig
from services.common.config.run import Config
from services.common.errors import DeadlineExceeded, InvalidInput, NotFound, PreconditionFailed
from services.coordinator.cli.agent import TypedModel, play_agent, say
from services.coordinator.clients.environment import row_of
from services.coordinator.data.order import environment_seed
from services.coordinator.data.prompts import Prompt
from services.coordinator.data.reading.hub import with_local_models
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.probes import AgentProbe, Answer, EnvironmentProbe
from services.coordinator.rl.session import load_data
from services.coordinator.text.tokenizer import Tokenizer


def typed_lines(console: Console) -> Iterator[str]:
    """Yields the lines that are typed, until the end of input."""
    while True:
        try:
            yield console.input("policy> ")
        except EOFError:
            return


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file. A line may be JSON text, for line breaks."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--replies: {path} cannot be read: {error}", field="replies") from error
    for line in lines:
        try:
            text = json.loads(line)
        except ValueError:
            text = line
        yield text if isinstance(text, str) else line


def play_row(
    config: Config, row: int, turns: Iterator[str], console: Console, place: Mapping[str, str] | None = None
) -> bool:
    """Plays the row with that number of the training data, and prints what happens. Returns whether nothing failed.

    Args:
        config: The run's config.
        row: Number of the row.
        turns: What the policy says.
        console: Where it is printed.
        place: Where this host listens for an agent elsewhere: `host`, and `tls`, a directory with credentials.

    Raises:
        InvalidInput: There is no environment, or it does not open.
        NotFound: The data has no such row, or its prompt was dropped.
    """
    if config.environment is None:
        raise InvalidInput("environment: the config has none to play", field="environment")
    prompt, tokenizer = _prompt(config, row)
    if isinstance(config.environment, AgentEnvironmentConfig):
        model = TypedModel(config, tokenizer, turns, console)
        with AgentProbe(config.environment, place, shows_errors=True) as agent:
            console.print(f"{_answer(agent.open)['version']}, prompt {prompt.prompt_id}", soft_wrap=True)
            return play_agent(agent, model, prompt, console)
    return _take_turns(config, config.environment, prompt, turns, console)


def _take_turns(
    config: Config, environment: TurnsConfig, prompt: Prompt, turns: Iterator[str], console: Console
) -> bool:
    with EnvironmentProbe(environment, shows_errors=True) as probe:
        opened = _answer(probe.open)
        console.print(f"{environment.kind} {opened['version']}, prompt {prompt.prompt_id}", soft_wrap=True)
        for tool in opened["tools"]:
            console.print(f"tool: {json.dumps(tool.get('function', tool), ensure_ascii=False)}", soft_wrap=True)
        for message in prompt.messages:
            say(console, message["role"], message["content"])
        seed = environment_seed(config.seed, prompt.prompt_id)
        answer = _answer(probe.play, {"reset": row_of(prompt), "seed": seed})
        for turn in range(environment.max_turns):
            if not _show(console, answer):
                return False
            if answer.get("done"):
                return True
            if (text := next(turns, None)) is None:
                console.print("no more turns of the policy: the episode was left")
                return True
            console.print(f"--- turn {turn + 1}")
            say(console, "policy", text)
            answer = _answer(probe.play, {"step": text})
            if "failure" not in answer:
                console.print(f"reward {answer.get('reward', 0.0):g}{', done' * answer.get('done', False)}")
        if _show(console, answer) and not answer.get("done"):
            console.print(f"environment.max_turns: {environment.max_turns} turns were played")
    return "failure" not in answer


def _answer(ask: Callable[..., Answer], *call: Mapping[str, object]) -> Answer:
    try:
        return ask(*call)
    except DeadlineExceeded as error:
        raise InvalidInput(f"environment: {error.message}", field="environment") from error
    except PreconditionFailed as error:
        why = f"environment: it does not open, or its process died: {error.message}"
        raise InvalidInput(why, field="environment") from error


def _prompt(config: Config, row: int) -> tuple[Prompt, Tokenizer]:
    data = load_data(with_local_models(config, has_weights=False), Addresses())
    assert data is not None, "the model's tokenizer is on this host"
    prompts = data.train.prompts
    index = bisect_left(prompts, row, key=_row_number)
    if index < len(prompts) and _row_number(prompts[index]) == row:
        return prompts[index], data.tokenizer
    raise NotFound(f"data.train has no row {row} that can be used (rows count from 0)", field="row")


def _row_number(prompt: Prompt) -> int:
    return int(prompt.prompt_id.partition("-")[0])


def _show(console: Console, answer: Answer) -> bool:
    """Prints the tool calls and messages of an answer, or its failure. Returns whether there is none."""
    if failure := answer.get("failure"):
        reason = failure["reason"].removeprefix("ENVIRONMENT_FAILURE_REASON_").lower()
        console.print(f"environment: {reason}: {failure['message']}", soft_wrap=True)
        return False
    for call in answer.get("tool_calls", ()):
        console.print(f"calls {call['name']}({call['arguments_json']})", soft_wrap=True)
    for message in answer.get("messages", ()):
        say(console, " ".join(filter(None, (message.get("role"), message.get("name")))), message.get("content", ""))
    return True
