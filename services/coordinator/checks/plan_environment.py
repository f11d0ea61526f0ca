"""Describes the needs of episodes: tokens, and processes beside the reward service."""

from services.common.config.environment import EnvironmentConfig
from services.common.config.run import Config


def environment_plan(config: Config) -> list[str]:
    """Returns the lines of `lockstep plan` about the environment; none if there is no environment."""
    environment = config.environment
    if environment is None:
        return []
    turn, response, prompt = (
        config.rollout.sampling.max_tokens,
        config.max_response_tokens,
        config.data.max_prompt_tokens,
    )
    turns = environment.max_turns * turn
    lines = [
        f"environment {environment.kind}: up to {environment.max_turns} turns of up to {turn} tokens "
        f"({turns} together), and messages of {_messages(environment)}",
        f"  an episode: {response} tokens after a prompt of up to {prompt}, together {prompt + response} of "
        f"rollout.max_model_len {config.rollout.max_model_len}, and of max_tokens_per_microbatch "
        + ", ".join(f"{model.max_tokens_per_microbatch} ({name})" for name, model in config.models.items()),
        "  a prompt counts with the schemas of its tools and the environment's first messages",
    ]
    if turns > response:
        key = "environment.max_tokens" if environment.max_tokens else "rollout.max_model_len"
        lines.append(
            f"  episodes with long turns end before turn {environment.max_turns}, with finish_reason length: {turns} "
            f"tokens of turns do not fit {response} (raise {key})"
        )
    prompts = config.selection.over_sampling.at_once(config.data.prompts_per_step)
    episodes = prompts * config.rollout.completions_per_prompt
    lines.append(f"  {episodes} episodes open at once; each reward service runs {_processes(environment)}")
    return lines


def _messages(environment: EnvironmentConfig) -> str:
    most = environment.max_message_tokens
    return f"up to {most} tokens each" if most else "any length (environment.max_message_tokens is not set)"


def _processes(environment: EnvironmentConfig) -> str:
    if environment.kind == "openenv":
        return f"no process, and has up to {environment.max_concurrent} connections"
    if environment.kind != "tools":
        return f"{environment.num_workers} worker processes of up to {environment.max_memory_gib:g} GiB"
    parts = []
    if any(tool.kind == "function" for tool in environment.tools):
        parts.append(f"{environment.num_workers} worker processes of up to {environment.max_memory_gib:g} GiB")
    parts += [f"up to {tool.max_concurrent} sandboxes" for tool in environment.tools if tool.kind == "python"]
    parts += [f"an index of {tool.corpus} in memory" for tool in environment.tools if tool.kind == "search"]
    parts += [f"the MCP server {tool.place}" for tool in environment.tools if tool.kind == "mcp" and tool.command]
    return ", ".join(parts) or "no process"
