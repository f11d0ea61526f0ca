"""Sends values with the last output of a sample, from the scheduler to the service.

They travel in a field that only KV connectors use, which Lockstep has none of. Seen with vLLM 0.26.0 and 0.32.0.
"""

from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput


def attach(output: EngineCoreOutput, key: str, value: Any) -> None:
    """Adds a value, of types that MessagePack has, to a sample's last output."""
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), key: value}


def attached(output: RequestOutput, key: str, default: Any) -> Any:
    """Returns what was attached, or `default` if nothing was."""
    return (output.kv_transfer_params or {}).get(key, default)
