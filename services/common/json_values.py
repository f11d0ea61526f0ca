"""Names the values that `json.loads` returns."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""A JSON object whose values were not checked."""
JsonMapping = Mapping[str, Any]
"""A JSON object that is only read."""
