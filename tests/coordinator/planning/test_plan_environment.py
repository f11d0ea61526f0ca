"""Tests what `lockstep plan` shows of an environment."""

from typing import Any

from services.common.config.run import Config
from services.coordinator.planning.plan import environment_plan


def test_an_environment_is_part_of_the_plan() -> None:
    def lines(environment: dict[str, Any], **sections: Any) -> str:
        tree = {
            "model": "-",
            "data": {"train": "a.parquet", "prompts_per_step": 8, "max_prompt_tokens": 1024},
            "rollout": {"max_model_len": 4096, "sampling": {"max_tokens": 512}},
            "reward": {"scorers": [{"kind": "exact"}]},
            **sections,
        }
        return "\n".join(environment_plan(Config.model_validate({**tree, "environment": environment})))

    plan = lines({"kind": "python", "path": "m:C", "max_turns": 4})
    assert "up to 4 turns of up to 512 tokens (2048 together), and messages of any length" in plan
    assert "3072 tokens after a prompt of up to 1024, together 4096 of rollout.max_model_len 4096" in plan
    assert "64 episodes open at once; each reward service runs 2 worker processes of up to 4 GiB" in plan
    assert "end before turn" not in plan
    plan = lines({"kind": "python", "path": "m:C", "max_turns": 8, "max_message_tokens": 99})
    assert "end before turn 8, with finish_reason length: 4096 tokens of turns do not fit 3072" in plan
    assert "raise rollout.max_model_len" in plan and "messages of up to 99 tokens each" in plan
    plan = lines({"kind": "python", "path": "m:C", "max_tokens": 1000})
    assert "do not fit 1000 (raise environment.max_tokens)" in plan
    tools = [{"kind": "python"}, {"kind": "search", "corpus": "c.parquet"}]
    plan = lines({"kind": "tools", "tools": tools}, selection={"over_sampling": {"factor": 2.0}})
    assert "128 episodes open at once; each reward service runs up to 2 sandboxes, an index of c.parquet" in plan
    assert lines({"kind": "tools", "tools": [{"kind": "calculator"}]}).endswith("runs no process")
    assert "128 connections" in lines({"kind": "openenv", "url": "ws://h:1/ws"})
