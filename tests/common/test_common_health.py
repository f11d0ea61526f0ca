"""The probe of containers."""

import pytest

from services.common.errors import Unavailable
from services.common.health import main, require_serving
from services.common.tls import LOCAL
from tests.coordinator.fake_services import replicas


async def test_a_service_that_serves_is_healthy_and_one_that_ended_is_not() -> None:
    async with replicas(1) as (fake,):
        address = fake.address
        await require_serving(address, LOCAL, timeout_s=5)
    with pytest.raises(Unavailable):
        await require_serving(address, LOCAL, timeout_s=5)


def test_the_command_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"lockstep-health: .*127\.0\.0\.1:1"):
        main(["127.0.0.1:1", "--timeout", "5"])
