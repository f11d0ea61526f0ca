"""Defines the config of environments, which answer the policy in episodes of several turns."""

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, RootModel, field_validator

from services.common.config.base import NAME, Strict, Table
from services.common.config.reward import check_encrypted, check_url
from services.common.import_path import IMPORT_PATH


class EpisodeSettings(Strict):
    """The keys that all kinds of environments have, agents too."""

    episode_s: float = Field(default=1800.0, gt=0, le=604800)
    """Time limit in seconds for a whole episode, including generation."""
    max_retries: int = Field(default=2, ge=0, le=100)
    """Number of times that an episode is played again, with the same seeds, after the environment failed. Failures that
    other episodes may have caused, and restarts of the reward service, do not count. An episode that hangs again in a
    worker of its own is not played again."""
    on_failure: Literal["drop_group", "fail"] = "drop_group"
    """What to do if the environment still fails. drop_group: the prompt group is left out of the batch; fail: the run
    fails. A failure of the environment never becomes a reward."""


class BaseEnvironmentConfig(EpisodeSettings):
    """The keys that all kinds of environments have which take turns with the policy."""

    max_turns: int = Field(default=8, ge=1, le=1000)
    """Maximum number of the policy's turns in an episode. An episode that reaches it ends with the rewards that it has
    so far."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of an episode after its first prompt, including the environment's. By default, as many
    as rollout.max_model_len leaves. A turn is limited by rollout.sampling.max_tokens."""
    max_message_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of one message of the environment. The rest of a longer one is cut off. If a message
    leaves no room for a turn, the episode ends with `length`."""
    turn_s: float = Field(default=30.0, gt=0, le=86400)
    """Time limit in seconds for one reply of the environment. Waiting because of max_concurrent does not count."""
    weight: float = 1.0
    """Factor of the environment's rewards in the reward of a sample, and in the component `environment`. The scorers'
    rewards are added."""

    @property
    def longest_reply_s(self) -> float:
        """Returns how long a reply may take, including waiting."""
        return self.turn_s


class ReasoningTags(Strict):
    """Which part of a turn is reasoning, which is neither an answer nor a call."""

    reasoning_tags: tuple[str, str] | tuple[()] = ("<think>", "</think>")
    """Begin and end of the policy's reasoning. What stands between them is not read: a tool that is only thought of is
    not called, an answer that is only considered is not scored. A turn begins within reasoning if its prompt ends with
    the first tag, as the prompts of some chat templates do. []: everything is read, for policies that call tools
    while they reason."""

    @field_validator("reasoning_tags")
    @classmethod
    def _tags_differ(cls, tags: tuple[str, str] | tuple[()]) -> tuple[str, str] | tuple[()]:
        # A tag that contains the other one would be taken for it.
        if tags and (not all(tag.strip() for tag in tags) or tags[0] in tags[1] or tags[1] in tags[0]):
            raise ValueError("must be two different texts, such as [<think>, </think>], or none: []")
        return tags


class WorkerEnvironmentConfig(BaseEnvironmentConfig):
    """The keys of environments that run in worker processes."""

    num_workers: int = Field(default=2, ge=1, le=1024)
    """Number of worker processes. Each runs many episodes. While episodes hang or crash, up to twice as many run beside
    them."""
    max_memory_gib: float = Field(default=4.0, gt=0.1, le=1 << 20)
    """Maximum address space of one worker, in GiB."""
    max_concurrent: int = Field(default=1024, ge=1, le=65536)
    """Maximum number of episodes that each reward service plays at once. Further ones wait, which does not count toward
    episode_s. An environment whose methods are not async takes a thread of a worker for each episode."""


class PythonEnvironmentConfig(WorkerEnvironmentConfig):
    kind: Literal["python"] = "python"
    """Run your own class, which must be importable on the reward service. It has the methods reset(seed, row) and
    step(text), sync or async, and optionally close(): see docs/environments.md."""
    path: str = Field(pattern=IMPORT_PATH)
    """Class, as package.module:Class. One object is made for each episode."""
    kwargs: Table = Field(default_factory=dict)
    """Keyword arguments for the class."""


class FunctionToolConfig(Strict):
    kind: Literal["function"] = "function"
    """Offer a Python function, sync or async, that is importable on the reward service. Its name, signature and
    docstring become the tool's JSON schema."""
    path: str = Field(pattern=IMPORT_PATH)
    """Function, as package.module:function. It returns text, or anything that JSON can hold."""


class PythonToolConfig(Strict):
    kind: Literal["python"] = "python"
    """Offer `python`, which runs a program in the sandbox and returns what it prints. Each call starts anew."""
    timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Time limit in seconds for one program. Programs of the same turn share turn_s equally, if that leaves each of
    them less. The policy is told if a program took longer."""
    max_output_chars: int = Field(default=4096, ge=2, le=1_000_000)
    """Number of characters of the output to return. The middle of a longer output is cut out."""
    max_concurrent: int = Field(default=2, ge=1, le=1024)
    """Maximum number of programs that run at the same time. Others wait, and waiting does not count toward turn_s."""


class SearchToolConfig(Strict):
    kind: Literal["search"] = "search"
    """Offer `search`, which ranks the documents of a Parquet file for a query by BM25."""
    corpus: str
    """Parquet file on the reward service's host, with a column `text` and optionally `title`. The index is kept in a
    folder beside it, for later runs."""
    top_k: int = Field(default=3, ge=1, le=100)
    """Number of documents to return."""


class CalculatorToolConfig(Strict):
    kind: Literal["calculator"] = "calculator"
    """Offer `calculator`, which computes an arithmetic expression."""


class McpToolConfig(Strict):
    kind: Literal["mcp"] = "mcp"
    """Offer the tools of an MCP server (`pip install 'lockstep-rl[mcp]'` on the reward service). All episodes share one
    session, so the tools may keep no state. Set command or url."""
    command: tuple[str, ...] = ()
    """Program and arguments of a server that the reward service starts, and calls over stdio."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables of the reward service that the command gets too, such as one with an API key. It
    gets HOME, LOGNAME, PATH, SHELL, TERM and USER anyway."""
    url: str = ""
    """Address of a running server, called over streamable HTTP. Errors name it without its query; write no key into its
    path."""
    api_key_file: str | None = Field(default=None, min_length=1)
    """File on the reward service's host with a key for url, which is sent as a bearer token: over https, or over http
    to loopback only."""
    names: tuple[str, ...] = ()
    """Names of the tools to offer; by default all that the server has."""
    timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """Time limit in seconds for one answer of the server. Exceeding it is the server's failure, not the policy's."""
    max_output_chars: int = Field(default=4096, ge=2, le=1_000_000)
    """Number of characters of a result to return. The middle of a longer one is cut out."""

    @property
    def place(self) -> str:
        """Names the server, without what may be a key in its URL."""
        return self.url.partition("?")[0] or " ".join(self.command)

    def check_rules(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("a tool of kind mcp needs either command or url")
        if self.url:
            check_url(self.url)
        for key, of in ("pass_env", "command"), ("api_key_file", "url"):
            if getattr(self, key) and not getattr(self, of):
                raise ValueError(f"{key}: used only with {of}")
        if self.api_key_file:
            check_encrypted(self.url)


_Tool = FunctionToolConfig | PythonToolConfig | SearchToolConfig | CalculatorToolConfig | McpToolConfig
ToolConfig = Annotated[_Tool, Field(discriminator="kind")]


class ToolSyntax(ReasoningTags):
    """How the policy writes calls of tools and how results are returned."""

    syntax: Literal["hermes", "qwen3_coder", "llama3", "tags"] = "hermes"
    """How the policy calls a tool. hermes: JSON between <tool_call> and </tool_call> (Qwen, Hermes); qwen3_coder:
    <function=name> and <parameter=name> between the same tags (Qwen3-Coder), read as the tool's schema says; llama3:
    the JSON object of Llama 3's templates, with name and parameters; tags: <name>...</name> with the tool's only
    argument as text (Search-R1)."""
    result_tag: str = Field(default="", pattern=r"^[A-Za-z0-9_]*$")
    """With syntax tags: return results as raw text between <tag> and </tag> within the policy's turn, as Search-R1's
    `information`, without the chat template. By default, and with the other syntaxes, a result is a message of role
    tool."""

    def check_rules(self) -> None:
        if self.result_tag and self.syntax != "tags":
            raise ValueError(f"result_tag {self.result_tag}: used only with syntax tags, not {self.syntax}")


class ToolsEnvironmentConfig(WorkerEnvironmentConfig, ToolSyntax):
    kind: Literal["tools"] = "tools"
    """Let the policy call tools. An episode ends with the first turn that calls none; reward.scorers judge it."""
    tools: tuple[ToolConfig, ...] = Field(min_length=1)
    """List of at least one tool, each with its kind."""

    @property
    def longest_reply_s(self) -> float:
        """Returns how long a reply may take; programs and searches may wait for others."""
        return self.episode_s if {"python", "search"} & {tool.kind for tool in self.tools} else self.turn_s

    def check_rules(self) -> None:
        super().check_rules()
        known = [tool for tool in self.tools if tool.kind != "mcp"]  # an MCP server's tools are known only once it runs
        names = [tool.path.partition(":")[2] if tool.kind == "function" else tool.kind for tool in known]
        if len(set(names)) < len(names):
            raise ValueError(f"tools: two have the same name: {', '.join(names)}")
        for tool in self.tools:
            if isinstance(tool, PythonToolConfig | McpToolConfig) and tool.timeout_s >= self.turn_s:
                raise ValueError(f"{tool.kind}: timeout_s {tool.timeout_s:g} must be below turn_s {self.turn_s:g}")


class TextArenaEnvironmentConfig(WorkerEnvironmentConfig, ReasoningTags):
    kind: Literal["textarena"] = "textarena"
    """Play a single-player game of textarena (`pip install textarena` on the reward service)."""
    game: str = Field(pattern=NAME)
    """Name of the game, such as GuessTheNumber-v0."""
    kwargs: Table = Field(default_factory=dict)
    """Keyword arguments for textarena.make."""


class ReasoningGymEnvironmentConfig(WorkerEnvironmentConfig, ReasoningTags):
    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Score answers to tasks of reasoning-gym (`pip install reasoning-gym` on the reward service). The rows come from
    `lockstep data reasoning-gym`, or the episode's seed makes a task."""
    task: str = Field(pattern=NAME)
    """Name of the task, such as chain_sum."""
    kwargs: Table = Field(default_factory=dict)
    """Settings of the task."""


class OpenEnvEnvironmentConfig(BaseEnvironmentConfig, ReasoningTags):
    kind: Literal["openenv"] = "openenv"
    """Play an environment of an OpenEnv server, over its WebSocket protocol. One connection is one episode."""
    url: str = Field(pattern=r"^wss?://")
    """Address of the server, such as ws://127.0.0.1:8000/ws. Errors name it without its query."""
    action_field: str = "message"
    """Field of the action that gets the policy's text."""
    observation_field: str = ""
    """Field of the observation that the policy is shown. By default, all of it as JSON, but for its `metadata`."""
    max_concurrent: int = Field(default=128, ge=1, le=65536)
    """Maximum number of open connections. Further episodes wait, and waiting does not count toward turn_s."""

    def check_rules(self) -> None:
        check_url(self.url.replace("ws", "http", 1))

    @property
    def longest_reply_s(self) -> float:
        """Returns how long a reply may take; the first may wait until other episodes end."""
        return self.episode_s


AnswerField = Literal[
    "tool_choice", "parallel_tool_calls", "response_format", "text", "output_config", "logit_bias", "logprobs",
    "top_logprobs", "truncation", "chat_template_kwargs",
]  # fmt: skip
"""Fields of an agent's requests that a run cannot honor, and that many agents do without."""


class AgentEnvironmentConfig(EpisodeSettings, ReasoningTags):
    kind: Literal["agent"] = "agent"
    """Train the model inside your own program, which calls it over HTTP with OpenAI's or Anthropic's API: see
    docs/agents.md. Set command, path or url."""
    command: tuple[str, ...] = ()
    """Program and arguments, run in a sandbox whose network reaches only the model. {prompt}, {seed} and {url} are
    replaced in each. {prompt} is the text of a prompt, or of its only message if that is a user's; with other messages,
    episodes fail."""
    path: str = Field(default="", pattern=rf"^$|{IMPORT_PATH}")
    """Function, as package.module:function, sync or async, that is importable on the reward service. It runs in a
    worker process without a sandbox, gets row, seed, url and key as keyword arguments, and returns the final text."""
    url: str = ""
    """URL of an agent that is a server, with https if it is on another host. It gets a POST for each episode, a JSON
    object with the row, a seed, and the url and key at which to call the model, and answers with {"text": ...}, the
    final text, once it has ended. An agent on another host calls the reward service with TLS."""
    port: int = Field(default=0, ge=0, le=65535)
    """With url: port of the reward service's host where the agent calls the model; 0 picks a free one."""
    columns: tuple[str, ...] = ()
    """Columns of data.extra_columns that the agent gets in its row, with the prompt. It never gets the answer."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command. {url}, {key} and {seed} are replaced. OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, ANTHROPIC_MODEL, HOME, PATH, LOCKSTEP_ROW (a file with the row as JSON) and
    LOCKSTEP_SEED are set."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files of the command: path in the sandbox -> file on the reward service's host. The path is below /workspace,
    where the command runs, or below HOME if it begins with ~/."""
    mounts: tuple[str, ...] = ()
    """Further directories and files of the reward service's host that the command can read, at the same path. It always
    has the system's programs and libraries, and the Python environment of the reward service."""
    setup: tuple[str, ...] = ()
    """Program and arguments to run in /workspace before the command. If it fails, the episode fails."""
    collect: tuple[str, ...] = ()
    """Patterns of files below /workspace, such as "*.py" or "out/**", to keep at the end of an episode. Scorers read
    them."""
    max_files_mib: float = Field(default=1.0, gt=0, le=16)
    """Maximum size of the collected files together, in MiB; the rest is not kept."""
    max_calls: int = Field(default=50, ge=1, le=10_000)
    """Maximum number of calls of the model in an episode, including those that are refused because their prompt is too
    long. An episode that reaches this, max_tokens or max_segments is over: calls are refused, the agent has grace_s to
    end, and the reward is scored."""
    max_tokens: int = Field(default=65536, ge=1)
    """Maximum number of sampled tokens in an episode. A call gets what is left when it begins, so calls at once may
    exceed it together. It is also limited by rollout.sampling.max_tokens and rollout.max_model_len."""
    max_segments: int = Field(default=32, ge=1, le=10_000)
    """Maximum number of rows that an episode becomes. Each conversation that does not only continue an earlier one is a
    segment: a sub-agent, a compacted history, an edited answer, a parallel call."""
    max_concurrent: int = Field(default=64, ge=1, le=65536)
    """Maximum number of episodes that a reward service plays at the same time. Others wait."""
    grace_s: float = Field(default=30.0, gt=0, le=86400)
    """Seconds that the agent has to end once its episode is over. Then it is ended; its files are still collected."""
    drop_tools: tuple[str, ...] = ()
    """Types of tools, such as web_search or namespace, to leave out of requests; a date at the end, as in
    web_search_20250305, need not be named. Without this, a request with a tool that is no function is refused."""
    drop_fields: tuple[AnswerField, ...] = ()
    """Fields of requests that constrain or extend an answer, such as tool_choice, to leave out. The agent may then get
    an answer that they would have ruled out. Without this, a request with one is refused."""
    tool_syntax: Literal["hermes", "qwen3_coder", "llama3", "none"] = "hermes"
    """How the model writes calls of the functions in a request; see the kind tools. none: its text is the answer."""
    num_workers: int = Field(default=2, ge=1, le=1024)
    """With path: number of worker processes. Each runs many episodes."""
    max_memory_gib: float = Field(default=4.0, gt=0.1, le=1 << 20)
    """Maximum address space of a worker or, in the sandbox, of one process, in GiB."""
    max_disk_mib: int = Field(default=256, ge=1, le=1 << 20)
    """Maximum size of all files in the sandbox, which are in memory, in MiB."""
    max_processes: int = Field(default=128, ge=1, le=1 << 16)
    """Maximum number of processes and threads in the sandbox."""

    def check_rules(self) -> None:
        if sum(map(bool, (self.command, self.path, self.url))) != 1:
            raise ValueError("kind agent needs either command or path, or url")
        own = ("env", "files", "mounts", "setup", "collect")
        if not self.command and (unread := [key for key in own if getattr(self, key)]):
            raise ValueError(f"{unread[0]}: only a command has it, because others run in no sandbox: leave it out")
        if self.port and not self.url:
            raise ValueError("port: only agents with a url call from elsewhere: leave it out")
        if self.url:
            check_encrypted(check_url(self.url), "url")
        for path in self.files:
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"files: {path} must be a path below /workspace or, with ~/, below HOME")
        for pattern in self.collect:
            path = PurePosixPath(pattern)
            is_odd = any(part == ".." or ("**" in part and part != "**") for part in path.parts)
            if not path.parts or path.is_absolute() or is_odd:
                raise ValueError(f"collect: {pattern!r} must be a pattern relative to /workspace, such as out/**/*.txt")


_LibraryConfig = TextArenaEnvironmentConfig | ReasoningGymEnvironmentConfig | OpenEnvEnvironmentConfig
TurnsConfig = PythonEnvironmentConfig | ToolsEnvironmentConfig | _LibraryConfig
"""Environments that take turns with the policy."""
EnvironmentConfig = Annotated[TurnsConfig | AgentEnvironmentConfig, Field(discriminator="kind")]


class EnvironmentSection(RootModel[EnvironmentConfig]):
    """The config section `environment`, as the reward service receives it."""


REWARDLESS = {"agent", "tools"}
"""The kinds of environments that give no rewards: only scorers do."""
