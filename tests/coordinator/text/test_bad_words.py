"""Tests that bad words become the token sequences that vLLM makes of them, and which are refused before a run."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm import SamplingParams

from services.common.errors import InvalidInput, NotFound
from services.coordinator.fleet.launch import Addresses
from services.coordinator.rl.sampling.collect import check_words, token_sequences
from services.coordinator.rl.session import load_data
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.fake_services import make_config
from tests.support import raises

WORDS = st.text(min_size=1, max_size=8) | st.sampled_from(["you", " you", "  clips", "<|im_end|>", "a\n", "12", "it's"])


@pytest.fixture
def pair(make_model: Callable[..., Path]) -> tuple[Tokenizer, Any]:
    directory = make_model()
    return Tokenizer.load(directory), AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad_words=st.lists(WORDS.filter(str.strip), max_size=5))
def test_words_have_the_tokens_that_vllm_gives_them(pair: tuple[Tokenizer, Any], bad_words: list[str]) -> None:
    ours, theirs = pair
    sampling = SamplingParams(bad_words=bad_words)
    sampling.update_from_tokenizer(SimpleNamespace(encode=theirs.encode, max_token_id=len(theirs) - 1))  # type: ignore[arg-type]
    assert token_sequences(ours, bad_words) == (sampling.bad_words_token_ids or [])


def test_a_word_at_the_begin_of_a_text_is_another_token_than_within(tokenizer: Tokenizer) -> None:
    sequences = token_sequences(tokenizer, ["is", "reason", "half"])
    texts = ["is", " is", "reason", " reason", "half"]  # " half" is one token, "half" two
    assert [tokenizer.decode(tokens) for tokens in sequences] == texts


@pytest.mark.parametrize(
    ("bad_words", "message"),
    [
        (["x", " \n"], "' \\\\n' has no tokens that could be forbidden"),
        (["<|im_end|>", "<|endoftext|>"], "all stop tokens .*every completion would reach max_tokens"),
        ([f"{number} x" for number in range(129)], "129 token sequences.*at most 128 with 1024 tokens"),
        (["7" * 1025], "of 1025 tokens; vLLM takes at most 128 with 1024 tokens"),
    ],
)
@pytest.mark.parametrize("section", ["rollout.sampling", "evaluation.sets.held"])
def test_words_with_which_sampling_could_not_work_are_refused(
    tokenizer: Tokenizer, section: str, bad_words: list[str], message: str
) -> None:
    with raises(InvalidInput, field=f"{section}.bad_words") as caught:
        check_words(tokenizer, configured(section, bad_words))
    assert re.match(rf"{section}\.bad_words: .*{message}", caught.value.message)


@pytest.mark.parametrize("section", ["rollout.sampling", "evaluation.sets.held"])
def test_a_completion_may_end_with_another_stop_token(tokenizer: Tokenizer, section: str) -> None:
    ends = ["<|im_end|>", "<|endoftext|>"]
    check_words(tokenizer, configured(section, ends[:1]))
    check_words(tokenizer, configured(section, ends, stop_token_ids=[9]))
    check_words(tokenizer, configured(section, ends, ignore_eos=True))  # it is to reach max_tokens
    with raises(InvalidInput, field=f"{section}.bad_words"):
        check_words(tokenizer, configured(section, ends, ignore_eos=True, stop_token_ids=[2]))


def test_a_run_is_refused_before_its_data_is_read(make_model: Callable[..., Path]) -> None:
    changed = {"model": str(make_model())}
    for section in ("rollout.sampling", "evaluation.sets.held"):
        with raises(InvalidInput, field=f"{section}.bad_words"):
            load_data(configured(section, [" "]).model_copy(update=changed), Addresses())
    with raises(NotFound, field="data.train"):
        load_data(configured("rollout.sampling", ["x"]).model_copy(update=changed), Addresses())


def test_a_word_that_the_vocabulary_lacks_is_named_with_its_key() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})), None, (0,))
    with raises(InvalidInput, field="rollout.sampling.bad_words") as caught:
        check_words(tokenizer, configured("rollout.sampling", ["b"]))
    assert "cannot encode 'b'" in caught.value.message


def test_a_stop_string_has_text(tokenizer: Tokenizer) -> None:
    check_words(tokenizer, configured("rollout.sampling", [], top_k=0, stop=["</a>", "<|im_end|>"]))  # ends it anyway
    config = configured("rollout.sampling", [], top_k=0, stop=["</a>", "<|im_end|>"], ignore_eos=True)
    with raises(InvalidInput, field="rollout.sampling.stop") as caught:
        check_words(tokenizer, config)
    tokens = tokenizer.encode("<|im_end|>")
    assert f"'<|im_end|>' is a special token and has no text to be found: set stop_token_ids to {tokens}" in str(caught)
    check_words(tokenizer, configured("rollout.sampling", [], stop_token_ids=tokens, ignore_eos=True))


def configured(section: str, bad_words: list[str], **sampling: Any) -> Any:
    is_training = section == "rollout.sampling"
    return make_config(
        data={"train": "t", "eval": {"held": "h"}, "prompts_per_step": 8},
        rollout={"sampling": {"top_k": 5, **sampling, "bad_words": bad_words if is_training else []}},
        evaluation={"sets": {"held": {"bad_words": [] if is_training else bad_words}}},
    )
