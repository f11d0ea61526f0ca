"""The plugin that vLLM loads in each process that it starts (entry point `vllm.general_plugins`)."""

import multiprocessing
import os
import select
import threading

from services.rollout.compat.patches import patch_vllm


def install() -> None:
    patch_vllm()
    _exit_with_parent()


def _exit_with_parent() -> None:
    """Ends an engine process when the process that started it ends; vLLM would leave it running (vllm#55510)."""
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _THREAD for thread in threading.enumerate()):
        return

    def watch() -> None:
        poller = select.poll()
        poller.register(parent.sentinel, select.POLLIN)
        poller.poll()
        os._exit(70)

    threading.Thread(target=watch, name=_THREAD, daemon=True).start()


_THREAD = "exit-with-parent"
