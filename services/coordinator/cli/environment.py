"""Plays an episode of a run's environment without a model for `lockstep env try`, with an agent or in turns."""

import asyncio
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.reward.v1.agent_pb2 import AgentEnd, Begin, PlayRequest, PlayResponse
from lockstep.types.v1.types_pb2 import Completion, FinishReason, PolicyStamp
from rich.console import Console

from services.common.config.environment import AgentEnvironmentConfig, TurnsConfig
from services.common.config.run import Config
from services.common.errors import DeadlineExceeded, InvalidInput, NotFound, PreconditionFailed, counted
from services.common.json_values import JsonMapping
from services.coordinator.clients.environment import EpisodeFailed, episode_failed, row_of
from services.coordinator.data.dialog import Dialog
from services.coordinator.data.order import environment_seed
from services.coordinator.data.prompts import Prompt
from services.coordinator.data.reading.hub import with_local_models
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.probes import AgentProbe, Answer, EnvironmentProbe
from services.coordinator.rl.sampling.agents import AgentEpisode, Sampled, begin_of
from services.coordinator.rl.sampling.collect import PromptRequest
from services.coordinator.rl.session import load_data
from services.coordinator.text.threads import Call, Renderer
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
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON text may have other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--replies: {path} cannot be read: {error}", field="replies") from error
    for line in lines if lines[-1] else lines[:-1]:
        try:
            text = json.loads(line)
        except ValueError:
            text = line
        yield text if isinstance(text, str) else line


def play_row(
    config: Config, row: int, turns: Iterator[str], console: Console, place: Mapping[str, str] | None = None
) -> bool:
    """Plays the row with that number of the training data, and prints what happens. Returns whether nothing failed.

    The policy says `turns`. `place` is where this host listens for an agent elsewhere: `host`, and `tls`, a directory
    with credentials.

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
    is_reasoning = Dialog(tokenizer, (), config).opens_reasoning(prompt.tokens)
    if is_reasoning:
        console.print("the chat template begins each turn within reasoning: end it before an answer", soft_wrap=True)
    return _take_turns(config, config.environment, prompt, turns, console, is_reasoning=is_reasoning)


def _take_turns(
    config: Config,
    environment: TurnsConfig,
    prompt: Prompt,
    turns: Iterator[str],
    console: Console,
    *,
    is_reasoning: bool,
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
            answer = _answer(probe.play, {"step": text, "is_reasoning": is_reasoning})
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


class NoMoreTurnsError(Exception):
    """The model has nothing more to say."""


class TypedModel:
    """Answers calls with texts, and shows the calls. Everything else is as in a run."""

    def __init__(self, config: Config, tokenizer: Tokenizer, turns: Iterator[str], console: Console):
        assert isinstance(config.environment, AgentEnvironmentConfig), "the caller has checked"
        self.config, self.settings = config, config.environment
        self.renderer = Renderer(tokenizer, config.data.chat_template_kwargs, config.rollout.max_model_len)
        self.dialog = Dialog(tokenizer, (), config)
        self._tokenizer, self._turns, self._console = tokenizer, turns, console

    @property
    def has_experts(self) -> bool:
        return False  # which only an engine could tell

    async def sample(self, call: Call, episode: AgentEpisode, limit: int, stop: Sequence[str]) -> Sampled:
        place = "begins a segment" if call.parent is None else f"continues call {call.parent.number}"
        tools = ", ".join(tool["function"]["name"] for tool in json.loads(call.tools))
        size = f"{len(call.prompt)} tokens{f', tools {tools}' if tools else ''}"
        self._console.print(f"--- call {call.number} {place}: {size}", soft_wrap=True)
        for message in call.conversation[len(call.parent.conversation) if call.parent else 0 :]:
            _show_message(self._console, message)
        if (text := next(self._turns, None)) is None:
            raise NoMoreTurnsError
        ends = [at + len(end) for end in stop if (at := text.find(end)) >= 0]
        tokens = self._tokenizer.encode(text[: min(ends, default=None)])
        tokens += [] if ends else [self._tokenizer.eos_token_ids[0]]
        is_cut = len(tokens) > limit
        tokens = tokens[:limit]
        reason = FinishReason.FINISH_REASON_LENGTH if is_cut else FinishReason.FINISH_REASON_STOP
        completion = Completion(tokens=tokens, logprobs=[0.0] * len(tokens), finish_reason=reason)
        return Sampled(completion, b"", b"", "")

    def count(self, **numbers: int) -> None: ...


def play_agent(probe: AgentProbe, model: TypedModel, prompt: Prompt, console: Console) -> bool:
    """Plays an episode of the open agent, and prints its calls and its end. Returns whether nothing failed."""
    request = PromptRequest(1, model.config.rollout.sampling, PolicyStamp(), 0)
    episode = AgentEpisode(model, prompt, request, 0)
    try:
        last = asyncio.run(_play(probe, episode, begin_of(prompt, model.config, "try"), console))
    except NoMoreTurnsError:
        console.print("no more turns of the policy: the episode was left")
        return True
    paths, end = episode.threads.paths(), last.end
    if last.HasField("failure"):
        failed, end = episode_failed(last.failure), AgentEnd(exit_code=1)
        console.print(failed.message, soft_wrap=True)
        if not episode.has_ended_by(failed):
            return False
        console.print("a call was refused at a limit, so a run scores the episode as it is")
    num_calls = sum(len(path.calls) - path.num_repeated for path in paths)
    segments = ", ".join(str([call.number for call in path.calls]) for path in paths)
    environment = model.config.environment
    is_program = environment is not None and environment.kind == "agent" and environment.command
    ended = f"exit code {end.exit_code}; " if is_program else ""
    console.print(f"--- {ended}{counted(num_calls, 'call')} in {counted(len(paths), 'segment')}: {segments}")
    if end.num_refused:
        refused = f"{counted(end.num_refused, 'request')} refused by the endpoint, the last because: {end.refusal}"
        console.print(refused, soft_wrap=True)
    for path, content in sorted(end.files.items()):
        console.print(f"collected {path}, {counted(len(content), 'byte')}", soft_wrap=True)
    say(console, "final text" if end.text else "no final text", end.text)
    try:
        episode.played(end, "", 0)
    except EpisodeFailed as error:
        console.print(error.message, soft_wrap=True)
        return False
    return True


async def _play(probe: AgentProbe, episode: AgentEpisode, begin: Begin, console: Console) -> PlayResponse:
    """Answers the calls of an episode one after the other. Returns the last message of the agent."""
    response = probe.play(PlayRequest(begin=begin))
    while response.HasField("call"):
        call, answer = response.call, await episode.answer(response.call)
        if answer.refusal:
            refusal = f"is refused, {answer.refusal_code}: {answer.refusal}"
            console.print(f"--- call {call.number} {refusal}", soft_wrap=True)
        elif call.counts:
            console.print(f"--- call {call.number} counts {answer.num_prompt_tokens} tokens", soft_wrap=True)
        else:
            _show_message(console, json.loads(answer.message_json))
        response = probe.play(PlayRequest(answer=answer))
    return response


def _show_message(console: Console, message: JsonMapping) -> None:
    if reasoning := message.get("reasoning"):
        say(console, "reasoning", reasoning)
    if message["content"] or not message.get("tool_calls"):
        say(console, message["role"], message["content"])
    for call in message.get("tool_calls", ()):
        say(console, "calls", f"{call['name']}({call['arguments']})")


def say(console: Console, who: str, text: str) -> None:
    console.print(f"[{who or 'text'}] {text}", soft_wrap=True)
