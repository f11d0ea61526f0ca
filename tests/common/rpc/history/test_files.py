"""Tests the files of the history: limited in size and number, torn by nothing, and no reason for a run to end."""

import io
import json
import logging
from pathlib import Path

import pytest

from services.common.rpc import history as files
from services.common.rpc.history import LineFiles, line_files


def written(directory: Path) -> list[list[dict]]:
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in line_files(directory)]


FIRST = {"t": 0, "rows": 7, "continues": False}


def test_each_session_and_each_full_file_begins_another_and_the_oldest_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 1)
    monkeypatch.setattr(files, "NUM_FILES", 4)
    directory = tmp_path / "history"
    for session in range(2):
        files_of_lines = LineFiles(directory, FIRST)
        for number in range(3):
            files_of_lines.put({"t": number, "row": 8 + number, "session": session, "number": number})
        files_of_lines.close()
    contents = written(directory)
    assert len(contents) <= 4
    lines = [(line["session"], line["number"]) for one in contents for line in one if "number" in line]
    assert lines[-3:] == [(1, 0), (1, 1), (1, 2)]
    assert contents[-1][0] == {"t": 2, "rows": 10, "continues": True}
    numbers = [int(path.stem.partition("-")[2]) for path in line_files(directory)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_lines_that_a_slow_disk_does_not_take_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files_of_lines = LineFiles(tmp_path / "history", FIRST)
    monkeypatch.setattr(files, "_MAX_WAITING", 0)
    files_of_lines.put({"number": 1})
    files_of_lines.put({"number": 2})
    monkeypatch.setattr(files, "_MAX_WAITING", 10)
    files_of_lines.put({"number": 3})
    files_of_lines.close()
    assert written(tmp_path / "history") == [[FIRST, {"lost": 2}, {"number": 3}]]


class NearlyFull(io.FileIO):
    """Takes a part of what is written, without an error, as a file does whose disk is nearly full."""

    def write(self, content: bytes) -> int:  # type: ignore[override]
        return super().write(content[: max(1, len(content) // 2)])


def test_lines_of_which_the_disk_takes_a_part_are_written_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: NearlyFull(path, mode))
    files_of_lines = LineFiles(tmp_path / "history", FIRST)
    files_of_lines.put({"number": 1})
    files_of_lines.close()
    monkeypatch.undo()
    assert written(tmp_path / "history") == [[FIRST, {"number": 1}]]


def test_a_disk_that_fails_ends_the_history_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "history").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        files_of_lines = LineFiles(tmp_path / "history", FIRST)
        for number in range(100):
            files_of_lines.put({"number": number})
        files_of_lines.close()
    assert "gets no more lines" in caplog.text
