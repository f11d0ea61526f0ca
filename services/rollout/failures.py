"""Explains why an engine did not start or died. vLLM's engine is a process of its own, and its error is only in the
log.
"""

import os
import re
from pathlib import Path

from services.common.errors import InternalError, Reason
from services.common.process import own_log

_MAX_READ_BYTES = 4 << 20
_ERROR = re.compile(r"\b(\w*(?:Error|Exception): .+)")
# What vLLM's other processes say after the engine's own error.
_CONSEQUENCE = re.compile("Engine core initialization failed|EngineDeadError")
_MEMORY = re.compile(r"out of memory|Free memory on device|No available memory for the cache|gpu_memory_utilization")
_MAX_SHOWN = 500


def log_size() -> int:
    """Returns the size of this process's log, or 0 if it has none."""
    return os.path.getsize(path) if (path := own_log()) else 0


def see_log() -> str:
    """Returns words that name this process's log, if it has one."""
    return f"; its log is {path}" if (path := own_log()) else ""


def start_failure(error: BaseException, begin: int) -> InternalError:
    """Returns the error to raise if vLLM did not start; `begin` is what `log_size` returned before."""
    cause = _cause(begin) or " ".join(str(error).split())
    return InternalError(f"rollout: the engine did not start{_told(cause)}{see_log()}", reason=Reason.ENGINE_DEAD)


def cause_of_death(begin: int) -> str:
    """Returns words for why a running engine died, and that name the log; "" if there is no log.

    `begin` is what `log_size` returned when the engine had started.
    """
    cause = _cause(begin)
    return (_told(cause) if cause else "") + see_log()


def _told(cause: str) -> str:
    advice = ""
    if _MEMORY.search(cause):
        advice = "; lower rollout.engine.gpu_memory_utilization, rollout.max_samples or rollout.max_model_len"
    return f": {cause[:_MAX_SHOWN]}{advice}"


def _cause(begin: int) -> str:
    """Returns the last error that the log has from byte `begin` on and that names a cause; "" if there is none."""
    if not (path := own_log()):
        return ""
    with Path(path).open("rb") as log:
        log.seek(max(begin, os.path.getsize(path) - _MAX_READ_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    found = [match[1] for line in lines if not _CONSEQUENCE.search(line) and (match := _ERROR.search(line))]
    return found[-1] if found else ""
