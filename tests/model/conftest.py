"""Shows how many states the searches have visited, and how long they took."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        found = dict(report.user_properties)
        if "states" in found:
            name = report.nodeid.rpartition("::")[2]
            terminalreporter.write_line(f"{found['states']:>8} states in {found['seconds']:>5} s: {name}")
