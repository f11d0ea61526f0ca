"""Defines the config of the scorer that runs programs."""

from typing import Literal

from pydantic import Field

from services.common.config.reward.scorer import BaseScorerConfig


class CodeConfig(BaseScorerConfig):
    """Scores 1 if the Python program in the completion passes the tests of its dataset row, else 0. Needs bubblewrap.

    services/reward/graders/code.py describes the forms of tests. This scorer does not use `timeout_s`, `num_workers`
    and `max_memory_gib` of the section `reward`.
    """

    kind: Literal["code"] = "code"
    """Run the completion's Python program against tests, in a sandbox (needs bubblewrap). The score is 1 if all tests
    pass, else 0."""
    tests_key: str | None = "tests"
    """Dataset column with the tests, which must be among data.extra_columns; null reads the tests from the answer."""
    partial: bool = False
    """Score the fraction of tests passed. With false all tests must pass, and testing stops at the first failure."""
    require_fence: bool = False
    """Score 0 if the completion has no fenced Python block. With false, a completion without any fence is run as a
    whole."""
    float_tolerance: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """Relative or absolute tolerance for numbers in a program's results, where the expected number is not an integer;
    0 requires exact equality. It does not apply to assert statements."""
    timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Time limit of one test, in seconds of wall-clock time."""
    program_timeout_s: float = Field(default=30.0, gt=0, le=86400)
    """Time limit of all tests of one program together, in seconds of wall-clock time; the tests that it does not reach
    count as failed. reward.group_timeout_s can make it shorter."""
    max_concurrent: int = Field(default=2, ge=1, le=1024)
    """Maximum number of programs that run concurrently. If it exceeds the number of cores, programs slow each other
    down and may time out."""
    max_memory_gib: float = Field(default=1.0, ge=0.125, le=1 << 20)
    """Maximum address space of one process, in GiB. The Python interpreter itself takes about 0.04 GiB."""
    max_processes: int = Field(default=16, ge=1, le=1024)
    """Maximum number of processes and threads of one program. A program can take up to this many times max_memory_gib
    of memory."""
    max_disk_mib: int = Field(default=64, ge=1, le=65536)
    """Size of a program's /tmp in MiB. It is in memory and also holds the test's input."""
    max_output_mib: float = Field(default=1.0, gt=0, le=64)
    """Maximum output of one test in MiB; a test with more output fails."""
