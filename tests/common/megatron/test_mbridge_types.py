"""Tests that a model that mbridge does not build is refused before anything starts."""

from dataclasses import replace

import pytest

from services.common.config.layout import check_layout
from services.common.config.megatron import MegatronConfig
from services.common.errors import InvalidInput, Reason
from services.common.families.architecture import Architecture
from services.common.families.registry import FAMILIES, MBRIDGE_TYPES
from tests.common.megatron.test_layout import DENSE, MOE
from tests.support import raises

BRIDGED = MegatronConfig(use_mbridge=True)


def small(model_type: str) -> Architecture:
    return replace(DENSE if "dense" in FAMILIES[model_type].kinds else MOE, model_type=model_type)


@pytest.mark.parametrize("model_type", MBRIDGE_TYPES)
def test_known_types_are_built(model_type: str) -> None:
    check_layout(BRIDGED, 1, architecture=small(model_type))


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - set(MBRIDGE_TYPES)))
def test_other_types_are_refused_with_those_that_are_known(model_type: str) -> None:
    field = "reference.megatron.use_mbridge"
    with raises(InvalidInput, reason=Reason.INVALID_CONFIG, field=field) as caught:
        check_layout(BRIDGED, 1, architecture=small(model_type), key="reference.megatron")
    assert f"{', '.join(MBRIDGE_TYPES)}, not {model_type}" in caught.value.message
