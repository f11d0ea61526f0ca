"""Tests that the coordinator runs without any model library installed."""

import subprocess
import sys


def test_no_model_library_is_imported():
    code = (
        "import importlib, pkgutil, sys, services.coordinator.data as data\n"
        "names = [module.name for module in pkgutil.iter_modules(data.__path__)]\n"
        "for name in names: importlib.import_module(f'{data.__name__}.{name}')\n"
        "import services.common.config.data\n"
        "print(len(names), sorted({'torch', 'vllm', 'transformers'} & sys.modules.keys()))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    num_modules, _, heavy = out.strip().partition(" ")
    assert int(num_modules) > 3
    assert heavy == "[]"
