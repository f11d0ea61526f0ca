"""The trainer as on a host with GPUs, where ranks are not forked."""

import runpy

from services.trainer import command

if __name__ == "__main__":
    command.may_fork = lambda: False
    runpy.run_module("services.trainer", run_name="__main__", alter_sys=True)
