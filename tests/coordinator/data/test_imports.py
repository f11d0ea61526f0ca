"""Tests that the coordinator's modules import no model library before one is needed."""

import subprocess
import sys


def test_no_model_library_is_imported():
    code = (
        "import importlib, pkgutil, sys, services.coordinator.data as data, services.coordinator.text as text\n"
        "walks = [pkgutil.walk_packages(folder.__path__, f'{folder.__name__}.') for folder in (data, text)]\n"
        "names = [module.name for walk in walks for module in walk]\n"
        "for name in names: importlib.import_module(name)\n"
        "import services.common.config.data\n"
        "print(len(names), sorted({'torch', 'vllm', 'transformers'} & sys.modules.keys()))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    num_modules, _, heavy = out.strip().partition(" ")
    assert int(num_modules) > 3
    assert heavy == "[]"
