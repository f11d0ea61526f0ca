"""Tests how often what died is started again: in place, or with a session that resumes the run."""

from types import SimpleNamespace

import pytest

from services.common.config.operation import RestartConfig
from services.common.errors import InternalError, LockstepError, Reason, Unavailable
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.running import Sessions
from services.coordinator.runs.run import Restarts
from tests.coordinator.fake_services import make_config

STARTED_HERE = Addresses()


def died(service: str) -> LockstepError:
    return Unavailable(f"{service} exited with code -9", reason=Reason.SERVICE_DIED, service=service)


LOST_RANK = InternalError("rank 1 on host a has disappeared", reason=Reason.RANK_FAILED)


def test_restarts_are_counted_for_each_service_within_the_window() -> None:
    now = 0.0
    restarts = Restarts(RestartConfig(max=2, window_s=10), lambda: now)
    assert [restarts.take("rollout-0") for _ in range(3)] == [True, True, False]
    assert restarts.take("rollout-1")
    now = 9.9
    assert not restarts.take("rollout-0")
    now = 10.0
    assert [restarts.take("rollout-0") for _ in range(3)] == [True, True, False]
    assert not Restarts(RestartConfig(max=0)).take("trainer")


def sessions(
    error: LockstepError,
    given: Addresses = STARTED_HERE,
    *,
    has_begun: bool = True,
    stopping: bool = False,
    **sections: object,
) -> tuple[list[str], LockstepError | None]:
    """Returns `resume` of every session, of which the first fail with `error`, and the error that was raised."""
    resumes: list[str] = []
    repeated = Sessions(make_config(**sections), given)
    try:
        while len(resumes) < 3:
            with repeated.repeating():
                repeated.restarts.run = SimpleNamespace(has_begun=has_begun, stopping=stopping)  # type: ignore[assignment]
                resumes.append(repeated.config.resume)
                if len(resumes) < 3:
                    raise error
    except LockstepError as failure:
        return resumes, failure
    return resumes, None


@pytest.mark.parametrize("error", [died("trainer"), died("critic"), LOST_RANK], ids=["trainer", "critic", "rank"])
def test_a_session_whose_trainer_died_is_repeated_and_resumes(error: LockstepError) -> None:
    assert sessions(error) == (["auto"] * 3, None)
    assert sessions(error, resume="never") == (["never", "auto", "auto"], None)
    assert sessions(error, resume="elsewhere/step-000002") == (["elsewhere/step-000002"] * 3, None)
    assert sessions(error, restart={"max": 1}) == (["auto"] * 2, error)


def test_a_session_that_cannot_wait_for_its_last_replica_is_repeated() -> None:
    error = Unavailable("no replica is left", reason=Reason.NO_REPLICA, service="rollout")
    assert sessions(error) == (["auto"] * 3, None)
    assert sessions(error, restart={"max": 1}) == (["auto"] * 2, error)


@pytest.mark.parametrize(
    ("error", "given"),
    [
        (Unavailable("no replica is left", reason=Reason.NO_REPLICA), STARTED_HERE),  # none is being restarted
        (died("rollout-0"), STARTED_HERE),  # it was started again in place as often as allowed
        (LOST_RANK, Addresses(trainer="127.0.0.1:1")),
        (InternalError("a bug"), STARTED_HERE),
        (Unavailable("the reward service is gone"), STARTED_HERE),
    ],
)
def test_other_failures_end_the_run(error: LockstepError, given: Addresses) -> None:
    assert sessions(error, given) == (["auto"], error)


def test_a_run_that_was_asked_to_stop_or_had_not_begun_is_not_repeated() -> None:
    error = died("trainer")
    assert sessions(error, stopping=True) == (["auto"], error)
    assert sessions(error, has_begun=False) == (["auto"], error)
