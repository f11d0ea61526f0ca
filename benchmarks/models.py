"""Compares every model of the tests' zoo with transformers: log-probabilities and gradients of strategy fsdp.

Writes results/models.json and the table in docs/models.md. Takes some minutes on two cores.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, keep
from tests.trainer.zoo import ZOO

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
_BEGIN, _END = "<!-- table: python -m benchmarks.models -->\n", "<!-- end of the table -->\n"


def main() -> None:
    from tests.trainer.zoo_harness import played  # imports torch, which the table needs not

    with tempfile.TemporaryDirectory() as name:
        results = played(Path(name), list(ZOO))
    samples = {
        f"{model}: {quantity} [{unit}]": [result[quantity]]
        for model, result in results.items()
        for quantity, unit in (("logprob", "nats"), ("gradient", "relative"))
        if quantity in result
    }
    refused = {model: result["refused"] for model, result in results.items() if "refused" in result}
    layouts = {model: result["layout"] for model, result in results.items() if "layout" in result}
    libraries = ("torch", "transformers", "accelerate")
    keep("models", samples, libraries=libraries, ranks=2, dtype="float32", layouts=layouts, refused=refused)
    begin, _, rest = DOCS.read_text().partition(_BEGIN)
    DOCS.write_text(
        begin + _BEGIN + table(json.loads((RESULTS / "models.json").read_text())) + _END + rest.partition(_END)[2]
    )


def table(result: Mapping[str, Any]) -> str:
    """Returns the rows of docs/models.md."""
    medians, settings = result["medians"], result["settings"]
    rows = ["| model | layout | log-probabilities, nats | gradient, relative |", "|---|---|---|---|"]
    for model in sorted({name.partition(":")[0] for name in medians} | settings["refused"].keys()):
        if model in settings["refused"]:
            rows.append(f"| {model} | refused | - | - |")
            continue
        logprob, gradient = medians[f"{model}: logprob [nats]"], medians[f"{model}: gradient [relative]"]
        rows.append(f"| {model} | {settings['layouts'][model]} | {logprob:.0e} | {gradient:.0e} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
