"""Tests what a run hears from a replica that refuses its config."""

import pytest
from lockstep.types.v1.types_pb2 import ModelCard

from services.common.errors import InvalidInput
from services.coordinator.clients.rollout import Rollout
from tests.coordinator.fake_services import make_config, replicas


async def test_a_replica_that_refuses_its_config_is_named():
    async with replicas(2) as fakes:
        rollout = Rollout([fake.address for fake in fakes], make_config())
        fakes[1].error["OpenRun"] = InvalidInput("no such draft", field="rollout.speculation.draft")
        with pytest.raises(InvalidInput, match=f"^replica {fakes[1].address}: no such draft$") as caught:
            await rollout.open("run", ModelCard())
        assert caught.value.metadata == {"field": "rollout.speculation.draft"}
        await rollout.close()
