"""Checks hosts and services before a run. This module has the result of a check, and the table that shows results."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check; `fix` is what to do if the verdict is not ok."""

    check: str
    result: str
    verdict: Verdict = Verdict.OK
    fix: str = ""


def show_findings(findings: Sequence[Finding], console: Console) -> bool:
    """Prints a table with a row per finding, with its fix. Returns whether no check failed."""
    table = Table("check", Column("found", overflow="fold"), "verdict", show_lines=False)
    for one in findings:
        fix = Text(f"\nfix: {one.fix}" if one.fix else "", style="dim")
        table.add_row(Text(one.check), Text.assemble(one.result, fix), Text(one.verdict, style=_STYLES[one.verdict]))
    console.print(table)
    return all(finding.verdict is not Verdict.FAIL for finding in findings)
