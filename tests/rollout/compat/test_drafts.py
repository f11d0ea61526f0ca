"""Tests that a sample's drafts are counted where the engine verifies them, and arrive with its last token."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from services.rollout.compat import scheduler


class PlayedScheduler:
    def __init__(self) -> None: ...

    def make_spec_decoding_stats(self, *args: Any, **counts: Any) -> None: ...

    def update_from_output(self, said: dict[int, EngineCoreOutputs], _: None) -> dict[int, EngineCoreOutputs]:
        return said

    def finish_requests(self, request_ids: list[str], _: None) -> list[SimpleNamespace]:
        return [SimpleNamespace(request_id=name) for name in request_ids]


class Counting(scheduler.CountsDrafts, PlayedScheduler):
    def draft(self, sample: str, num_drafted: int, num_accepted: int, invalid: dict[str, int] | None = None) -> None:
        counts = {"num_draft_tokens": num_drafted, "num_accepted_tokens": num_accepted}
        self.make_spec_decoding_stats(None, **counts, num_invalid_spec_tokens=invalid, request_id=sample)

    def end(self, sample: str) -> scheduler.Drafts:
        last = EngineCoreOutput(sample, [1], finish_reason=FinishReason.LENGTH)
        self.update_from_output({0: EngineCoreOutputs(outputs=[last])}, None)
        arrived: Any = SimpleNamespace(kv_transfer_params=last.kv_transfer_params)
        return scheduler.drafts_of(arrived)


def test_a_samples_last_output_has_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_searches_s", [])
    played = Counting()
    played.draft("a", 4, 4)
    played.draft("b", 2, 0)
    played.draft("a", 4, 1, {"a": 1})
    scheduler._timed(sorted)([2, 1])
    ended = played.end("a")
    assert (ended.num_drafts, ended.num_drafted, ended.num_accepted) == (2, 7, 5) and ended.seconds > 0
    played.finish_requests(["b"], None)
    assert played.end("b") == scheduler.Drafts()
    assert scheduler.drafts_of(SimpleNamespace(kv_transfer_params=None)) == scheduler.Drafts()


def test_drafts_are_counted_only_with_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler.__init__", lambda self, **arguments: None)
    monkeypatch.setattr(scheduler, "time_drafts", lambda: None)
    settings = {"scheduler_config": SimpleNamespace(async_scheduling=False), "additional_config": {}}
    made = {
        is_on: scheduler.scheduler(SimpleNamespace(**settings, speculative_config=is_on or None))
        for is_on in (False, True)
    }
    assert not isinstance(made[False], scheduler.CountsDrafts) and isinstance(made[True], scheduler.CountsDrafts)
