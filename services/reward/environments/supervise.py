"""Runs a program inside the sandbox and prints what it wrote: the source of this file is the sandbox's program.

    stdin: JSON {"program", "timeout_s", "max_chars"}
    stdout: output and errors as the program wrote them, the middle cut out; a last line if it did not end well

It imports only the standard library, because the sandbox has nothing else.
"""

import json
import os
import select
import subprocess
import sys
import time


def main() -> None:
    """Runs the program until it ends or its time is over."""
    job = json.load(sys.stdin)
    with open("/tmp/program.py", "w", encoding="utf-8", errors="replace") as file:
        file.write(job["program"])
    command = [sys.executable, "-u", "-s", "-B", "-X", "utf8", "/tmp/program.py"]
    running = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/tmp"
    )
    half = job["max_chars"] // 2
    head, tail, ended = _read(running, 4 * half, time.monotonic() + job["timeout_s"])
    text = _decode(head + tail)
    if len(text) > 2 * half or len(head) + len(tail) == 8 * half:
        text = f"{_decode(head)[:half]}\n[... cut ...]\n{text[len(text) - half :]}"
    if not ended:
        text += f"\nerror: timed out after {job['timeout_s']:g} s"
    elif status := running.wait():
        text += f"\nerror: exit status {status}"
    sys.stdout.write(text)


def _read(running: subprocess.Popen, half: int, deadline: float) -> tuple[bytes, bytes, bool]:
    """Returns the first and the last bytes, and whether the program has ended. What it started may still run."""
    head, tail, ended = bytearray(), bytearray(), False
    assert running.stdout, "it is a pipe"
    pipe, process, poll = running.stdout.fileno(), os.pidfd_open(running.pid), select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(process, select.POLLIN)
    while not ended and time.monotonic() < deadline:
        for descriptor, _ in poll.poll(max(0, deadline - time.monotonic()) * 1000):
            if descriptor == process:
                ended = True
            elif not _take(pipe, head, tail, half):
                poll.unregister(pipe)
    if not ended:
        running.kill()
    os.set_blocking(pipe, False)
    left = 1 << 20  # what is in the pipe; a process that the program left behind may write forever
    while left > 0 and (size := _take(pipe, head, tail, half)):
        left -= size
    return bytes(head), bytes(tail), ended


def _take(pipe: int, head: bytearray, tail: bytearray, half: int) -> int:
    """Reads what there is and returns its size; keeps the first and the last `half` bytes."""
    try:
        chunk = os.read(pipe, 65536)
    except BlockingIOError:
        return 0
    room = half - len(head)
    head += chunk[:room]
    tail += chunk[room:]
    del tail[: max(0, len(tail) - half)]
    return len(chunk)


def _decode(data: bytes) -> str:
    return data.decode(errors="replace")


if __name__ == "__main__":
    main()
