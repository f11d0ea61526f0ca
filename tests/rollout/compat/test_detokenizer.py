"""Tests what the detokenizer module assumes of vLLM and transformers; that stop strings work is in test_generate.py."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.engine.detokenizer import uses_fast_detokenizer

from services.rollout.compat.client import set_tokenizer


def fake_llm() -> SimpleNamespace:
    return SimpleNamespace(output_processor=SimpleNamespace(tokenizer=None))


def test_vllm_takes_the_tokenizer_for_its_fast_detokenizer(model):
    llm = fake_llm()
    set_tokenizer(llm, model("untied"))
    assert uses_fast_detokenizer(llm.output_processor.tokenizer)


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_model_without_a_tokenizer_raises_what_the_engine_expects(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    llm = fake_llm()
    with pytest.raises((OSError, ValueError)):
        set_tokenizer(llm, tmp_path)
    assert llm.output_processor.tokenizer is None
