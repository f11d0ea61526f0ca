"""Checks an agent against the other sections of the config, and says what a command gets of a prompt."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import cast

from services.common.config.data import DataConfig
from services.common.config.environment import AgentEnvironmentConfig
from services.common.config.loss import LossConfig
from services.common.config.reward import RewardConfig


def check_collected(agent: AgentEnvironmentConfig, reward: RewardConfig) -> None:
    """Refuses a code scorer whose `file` no pattern of `collect` matches: it would find no program in any sample."""
    for scorer in reward.scorers:
        if scorer.kind != "code" or not scorer.file:
            continue
        name = PurePosixPath(scorer.file)
        if str(name) != scorer.file:
            raise ValueError(f"reward.scorers: code has file {scorer.file}: write {name}, as collected files are named")
        # A pattern may match less than here, where * also matches a slash.
        patterns = [form for pattern in agent.collect for form in (pattern, pattern.replace("**/", ""))]
        if not agent.command or not any(fnmatchcase(scorer.file, pattern) for pattern in patterns):
            raise ValueError(
                f"reward.scorers: code has file {scorer.file}, which no agent would leave: set environment.command, "
                f"and environment.collect to patterns of which one matches it, such as [{scorer.file}]"
            )


def check_agent(agent: AgentEnvironmentConfig, data: DataConfig, loss: LossConfig) -> None:
    """Refuses what would treat the segments of an episode as samples, and what an agent does not get."""
    keys = [f"kind {loss.kind}"] if loss.kind in ("gspo", "gmpo") else []
    keys += ["correction.weight sequence"] if loss.correction.weight == "sequence" else []
    keys += [f"correction.{key}" for key in ("geometric_mask", "veto") if getattr(loss.correction, key) is not None]
    if keys:
        raise ValueError(
            f"trainer.loss.{keys[0]} with an agent: it is made of the ratio of a whole sample, and an episode of "
            "several segments has no such ratio; use a loss of single tokens"
        )
    if data.system_prompt is not None:
        raise ValueError(
            "data.system_prompt with an agent: it would be shown to nobody, because an agent sends all messages "
            "itself; leave it out, and let the agent send it"
        )
    missing = [name for name in agent.columns if data.extra_columns is not None and name not in data.extra_columns]
    if missing:
        raise ValueError(f"environment.columns: {missing[0]} is not one of data.extra_columns")


def prompt_text(prompt: object) -> str | None:
    """Returns what {prompt} of a command stands for, given a row's prompt; None if that is other than a text or one
    message of a user."""
    if isinstance(prompt, str):
        return prompt
    messages = cast(Sequence[Mapping[str, str]], prompt)
    return messages[0]["content"] if [message["role"] for message in messages] == ["user"] else None
