"""Holds the rollout service's uses of vLLM internals, seen with vLLM 0.26.0 (CUDA) and 0.32.0 (CPU).

It has several modules, so that no process imports more of vLLM than it uses:

    engine_fork   in the service, on CPU: forks engines from a process that has imported vLLM
    client        in the service: calls what AsyncLLM has no public method for, and forbids tokens
    scheduler     in the engine: sends tokens 32 at a time
    drafts        in the engine: counts what speculative decoding drafts for each sample
    temperatures  in the engine's workers, on CPU: verifies drafted tokens at the temperature of their sample
    routes        in the engine and its workers: returns the experts that the layers chose
    kept          in the engine and its workers: returns the tokens that truncated sampling has kept
    worker        in the engine's workers: reads what a worker extension needs from its worker
    memory        in the engine's workers: reads how much memory sleep mode has given back
    reload        in the engine's workers: reloads a live model's weights layer by layer
"""

from services.common.compat.versions import require_version

require_version("vllm")
