"""Probes: checks in a process of their own."""

import os
import select
import subprocess
import sys

_STARTER = """
import subprocess, sys
probe = subprocess.Popen([sys.executable, "-m", "services.common.probe", "functions"])
print(probe.pid, flush=True)
probe.wait()
"""


def test_a_probe_whose_input_stays_open_ends_with_the_process_that_started_it():
    reading, writing = os.pipe()
    starter = subprocess.Popen([sys.executable, "-c", _STARTER], stdin=reading, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    probe = os.pidfd_open(int(starter.stdout.readline()))
    os.write(writing, b"{}\n")
    assert starter.stdout.readline() == "{}\n"  # it waits for the next request now

    starter.kill()
    starter.wait()

    assert select.select([probe], [], [], 60)[0]
    for descriptor in (probe, reading, writing):
        os.close(descriptor)
    starter.stdout.close()
