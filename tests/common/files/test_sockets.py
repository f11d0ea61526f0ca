"""Tests where directories for Unix sockets are made."""

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from services.common import process as sockets
from services.common.errors import InvalidInput
from services.common.process import socket_directory


def bind(directory: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(directory, "0" * 36))


@pytest.mark.parametrize("length", [10, 43, 44, 52, 53, 107, 200])
def test_sockets_can_be_made_however_long_the_temporary_directory_is(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as base:
        place = Path(base, *["d" * 40] * (length // 41), "d" * max(1, length % 41))
        place.mkdir(parents=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with socket_directory() as directory:
            bind(directory)
            assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
            is_short = len(str(place)) <= 52
            assert (Path(directory).parent == place) is is_short
        assert not Path(directory).exists()
        assert list(place.iterdir()) == []


def test_a_host_without_a_place_for_sockets_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(sockets, "_SHORT_PLACES", (str(tmp_path / "absent"),))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    with pytest.raises(InvalidInput, match=r"TMPDIR: .*d: AF_UNIX path too long; .*absent: No such file") as caught:
        socket_directory()
    assert caught.value.metadata["field"] == "TMPDIR"
    assert list(long.iterdir()) == []
