"""Config of the scorer that runs programs."""

from typing import Literal

from pydantic import Field

from services.common.config.reward.scorer import BaseScorerConfig


class CodeConfig(BaseScorerConfig):
    """1 if the Python program in the completion passes the tests of its dataset row, else 0. Needs bubblewrap.

    The forms of tests are in services/reward/graders/code.py. Of the section `reward`, `timeout_s`, `num_workers` and
    `max_memory_gib` do not count here.
    """

    kind: Literal["code"] = "code"
    """Runs programs in a sandbox."""
    tests_key: str | None = "tests"
    """Column of the dataset's rows that has the tests, which data.extra_columns must hand over; null: the answer."""
    partial: bool = False
    """The score is the fraction of tests passed. Otherwise all must pass, and the first that fails ends the run."""
    require_fence: bool = False
    """Without a fenced block of Python the score is 0; otherwise a completion without any fence is the program."""
    float_tolerance: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """A number is right within this, relative or absolute, where the expected one is no integer; 0: exactly equal.
    Asserts always mean exactly what they say."""
    timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Most seconds of wall-clock time for one test."""
    max_concurrent: int = Field(default=2, ge=1, le=1024)
    """Programs that run at once; more than there are cores and they take one another's time."""
    max_memory_gib: float = Field(default=1.0, ge=0.125)
    """Address space of one process; the interpreter itself takes about 0.04 GiB."""
    max_processes: int = Field(default=16, ge=1, le=1024)
    """Processes and threads of one program; the most memory it can take is this many times max_memory_gib."""
    max_disk_mib: int = Field(default=64, ge=1, le=65536)
    """Size of its /tmp, which is memory and holds the input of a test too."""
    max_output_mib: float = Field(default=1.0, gt=0, le=64)
    """A test with more output than this fails."""
