"""Tests that hostile YAML ends in a message, quickly, and that ordinary anchors and merges still work."""

import pytest
import yaml

from services.common.config.load import load
from services.common.config.read_yaml import parse_yaml
from services.common.config.run import Config
from services.common.errors import InvalidInput

_LEVELS = 12
BOMBS = {
    "aliases": "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * 10}]\n" for n in range(_LEVELS)),
    "merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n + 1}: &a{n + 1} {{<<: [{f'*a{n}, ' * 10}]}}\n" for n in range(_LEVELS)),
    "deep lists": "a: " + "[" * 5000 + "]" * 5000,
    "deep tables": "\n".join(" " * depth + "a:" for depth in range(500)),
    "itself": "a: &a [*a]",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.timeout(60)  # written out, the bombs have 10^12 values
def test_a_bomb_is_refused_by_file_and_by_override(text: str, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=r"run\.yaml is not YAML: "):
        load(Config, [str(tmp_path / "run.yaml")])
    flow = text if text.startswith("a: ") else f"{{{','.join(text.splitlines())}}}"
    with pytest.raises(InvalidInput, match=r"is not a YAML value: |unknown key"):
        load(Config, [f"data={flow.removeprefix('a: ')}"])


def test_a_key_with_too_many_parts_is_refused():
    with pytest.raises(InvalidInput, match="no key has 5000 parts"):
        load(Config, [".".join(["a"] * 5000) + "=1"])


def test_anchors_and_merges_of_a_usual_size_work():
    text = "base: &base {lr: 1, betas: &betas [0.9, 0.99]}\ntrainer: {<<: *base, eps: 2}\nother: *betas"
    assert parse_yaml(text)["trainer"] == {"lr": 1, "betas": [0.9, 0.99], "eps": 2}
    assert parse_yaml(text)["other"] == [0.9, 0.99]


def test_a_key_that_is_set_twice_is_refused():
    with pytest.raises(yaml.YAMLError, match="lr is set twice"):
        parse_yaml("lr: 1\nlr: 2")
