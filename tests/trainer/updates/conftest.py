"""Provides sizes of chunks of logits."""

from collections.abc import Iterator

import pytest

from services.trainer.updates import logprobs
from tests.trainer.updates.logits import V


@pytest.fixture(params=[1, 2 * V, 3 * V, 1 << 20], ids=lambda entries: f"{entries}-entries")
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Makes chunks of 1 token (also when the budget is below one token's logits), 2, 3 (with a rest of 1), and all.

    Only in the last case the logits are kept.
    """
    monkeypatch.setitem(logprobs._ENTRIES_PER_CHUNK, "cpu", request.param)
    monkeypatch.setitem(logprobs._KEPT_ENTRIES, "cpu", request.param)
    return request.param
