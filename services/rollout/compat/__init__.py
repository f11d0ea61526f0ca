"""The rollout service's uses of vLLM internals (see services.common.compat).

Seen with vLLM 0.26.0 (CUDA) and 0.32.0 (CPU). No process imports more of vLLM than it uses:

    client       in the service: forks engines from a process that has imported vLLM, and does what AsyncLLM has no
                 public method, parameter or setting for
    patches      in all processes of an engine: shares compiled models, and mends speculative decoding on CPU
    scheduler    in the engine: sends tokens 32 at a time, and counts drafts
    recorded     in the engine, its workers and the service: returns sampling masks, routed experts and other values
                 with a sample's last output
    worker       in the engine's workers: what a worker extension reads of its worker, frees and reloads
"""

from services.common.compat import require_version

require_version("vllm")
