"""Compares every model of the tests' zoo with transformers, with strategy fsdp on two ranks.

`python -m benchmarks.models [MODEL ...]` measures the named models, or all, and keeps what earlier calls measured:
log-probabilities and gradients, those of a merged and exported adapter, and an update of it after resuming. Writes
results/models.json and, with what benchmarks.models_with_engine has measured, the table in docs/models.md. Takes half
an hour on two cores.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, keep
from tests.trainer.zoo import ZOO

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
_BEGIN, _END = "<!-- table: python -m benchmarks.models -->\n", "<!-- end of the table -->\n"
# A function of tests/trainer/zoo_harness.py, a key of what it returns, and the quantity in the results.
_MEASURED = (
    ("compare", "logprob", "logprob [nats]"),
    ("compare", "gradient", "gradient [relative]"),
    ("compare_adapters", "logprob", "LoRA [nats]"),
    ("compare_adapters", "resumed", "resumed [difference]"),
)
_ENGINE = "largest difference in a step [nats]"
_COLUMNS = (
    "model",
    "layout",
    "log-probabilities, nats",
    "gradient, relative",
    "LoRA, nats",
    "resumed",
    "vLLM on CPU, nats",
    "megatron",
)


def main() -> None:
    names, path = sys.argv[1:] or list(ZOO), RESULTS / "models.json"
    earlier = json.loads(path.read_text())
    samples, settings = dict(earlier["samples"]), earlier["settings"]
    for what in ("compare", "compare_adapters"):
        for model, found in _played(names, what).items():
            for of, key, quantity in _MEASURED:
                if of == what and key in found:
                    samples[f"{model}: {quantity}"] = [found[key]]
            for key, kept in (("refused", "refused"), ("layout", "layouts")):
                if key in found:
                    settings[kept][model] = found[key]
    libraries = ("torch", "transformers", "accelerate")
    settings["megatron"] = [model for model in ZOO if _is_of_megatron(model)]
    keep("models", dict(sorted(samples.items())), libraries=libraries, **settings)
    write_table()


def _played(names: list[str], what: str) -> dict[str, dict[str, Any]]:
    from tests.trainer.zoo_harness import played  # imports torch, which the table needs not

    with tempfile.TemporaryDirectory() as name:
        return played(Path(name), names, what)


def _is_of_megatron(model: str) -> bool:
    from services.common.errors import InvalidInput
    from services.common.families.supported import require_supported
    from tests.trainer.zoo_harness import zoo_config

    try:
        require_supported(zoo_config(model).to_dict(), "megatron", model)
    except InvalidInput:
        return False
    return True


def write_table() -> None:
    begin, _, rest = DOCS.read_text().partition(_BEGIN)
    results = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("models", "models-with-engine"))
    DOCS.write_text(begin + _BEGIN + table(*results) + _END + rest.partition(_END)[2])


def table(result: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Returns the rows of docs/models.md."""
    rows = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    for model in sorted({name.partition(":")[0] for name in result["medians"]} | result["settings"]["refused"].keys()):
        rows.append(f"| {' | '.join([model, *_cells(model, result, engine)])} |")
    return "\n".join(rows) + "\n"


def _cells(model: str, result: Mapping[str, Any], engine: Mapping[str, Any]) -> list[str]:
    settings, medians = result["settings"], result["medians"]
    if model in settings["refused"]:
        return ["refused", *["-"] * (len(_COLUMNS) - 2)]
    measured = [medians.get(f"{model}: {quantity}") for _, _, quantity in _MEASURED]
    *cells, resumed = ["-" if number is None else f"{number:.0e}" for number in measured]
    of_engine = engine["samples"].get(f"{model}: {_ENGINE}")
    return [
        settings["layouts"][model],
        *cells,
        "to the bit" if resumed == "0e+00" else resumed,
        f"{max(of_engine):.0e}" if of_engine else "not served" if model in engine["settings"]["failed"] else "-",
        "yes" if model in settings["megatron"] else "no",
    ]


if __name__ == "__main__":
    main()
