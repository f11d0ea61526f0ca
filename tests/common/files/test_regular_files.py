"""Tests that only plain files are opened, that nobody waits for the other end of a pipe, and that files are written as
a whole."""

import os
import socket
from pathlib import Path

import pytest

from services.common.files import open_plain_file, write_whole


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("key")  # as Kubernetes mounts a secret
    for name in ("key", "link"):
        with open_plain_file(tmp_path / name) as file:
            assert file.read() == b"abc"


@pytest.mark.timeout(60)
def test_anything_else_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path / "link", tmp_path / "socket", tmp_path, Path("/dev/zero")):
            with pytest.raises(OSError, match=r"not a regular file|No such device"):
                open_plain_file(path)


def test_what_is_written_leaves_links_and_pipes_as_they_are(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "elsewhere" / "page"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("first", "second"):
        write_whole(link, text)
        assert link.is_symlink() and target.read_text() == text
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "link", "page", "pipe"]
