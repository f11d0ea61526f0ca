"""Starts an engine with vLLM's V1 model runner if the V2 one cannot do what the run needs.

Reason: vLLM 0.26 runs dense models on GPU with Model Runner V2. Its sampler is not the one that kept.py hooks, and it
gives an EAGLE-3 head random weights, because it ignores the load format of drafts. Only an environment variable, which
engines inherit, chooses the runner. Read in the source of vLLM 0.26.0, and not run; 0.32 loads heads with both runners.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from packaging.specifiers import SpecifierSet

from services.common.compat.versions import require_version
from services.rollout.compat.vllm.kept import KEY

_LIMITED = SpecifierSet(">=0.26,<0.32")
_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


@contextmanager
def suitable_model_runner(arguments: Mapping[str, Any], *, is_gpu: bool) -> Iterator[None]:
    """Makes an engine that is started with `arguments` inside the `with` block use a model runner that can run it."""
    is_hooked = KEY in (arguments.get("additional_config") or {})
    has_head = (arguments.get("speculative_config") or {}).get("method") == "eagle3"
    if not (is_gpu and (is_hooked or has_head) and require_version("vllm") in _LIMITED):
        yield
        return
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "0"
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        if before is not None:
            os.environ[_VARIABLE] = before
