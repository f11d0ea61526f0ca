"""Rules of float8, in engines and in training: as in test_rules.py, with the nearest configs that keep them."""

import pytest

from services.common.config.load import load
from services.common.config.run import Config
from tests.common.config.smallest import refused

FLOAT8 = ["trainer.strategy=megatron", "trainer.megatron.fp8=tensorwise"]
TIS = ["trainer.loss.correction.weight=token"]
RULES = {
    **{
        f"samples of a {key} engine are corrected, {name}": (
            [f"rollout.{key}=fp8", *loss],
            [
                f"rollout.{key} fp8",
                "does not correct",
                "trainer.loss.correction.weight token",
                f"leave rollout.{key} out",
            ],
            [f"rollout.{key}=fp8", *loss, *right],
        )
        for key in ("precision", "kv_cache_dtype")
        for name, loss, right in (
            ("TIS", [], ["trainer.loss.correction.weight=token"]),
            ("of the sequence", [], ["trainer.loss.correction.weight=sequence"]),
            ("IcePop", [], ["trainer.loss.correction.token_mask=[0.5, 5]"]),
            ("not by a veto alone", ["trainer.loss.correction.veto=1e-4"], ["trainer.loss.correction.weight=token"]),
            ("by the ratio", ["trainer.loss.kind=grpo"], ["trainer.loss.old_logprobs=engine"]),
            (
                "not by a ratio without bounds",
                ["trainer.loss.kind=reinforce", "trainer.loss.old_logprobs=engine"],
                ["trainer.loss.kind=cispo"],
            ),
        )
    },
    "adapters are served on a base that is not quantized": (
        ["rollout.precision=fp8", *TIS, "trainer.lora.rank=4", "trainer.lora.publish=adapter"],
        ["rollout.precision fp8", "set trainer.lora.publish merged"],
        ["rollout.precision=fp8", *TIS, "trainer.lora.rank=4"],
    ),
    "float32 is not quantized": (
        ["rollout.precision=fp8", *TIS, "rollout.dtype=float32"],
        ["precision fp8 with dtype float32", "set dtype to auto"],
        ["rollout.precision=fp8", *TIS, "rollout.dtype=bfloat16"],
    ),
    "a head beside a quantized engine": (
        ["rollout.precision=fp8", *TIS, "rollout.speculation={kind: eagle3, draft: d}"],
        ["precision fp8", "eagle3"],
        ["rollout.precision=fp8", *TIS, "rollout.speculation={kind: ngram}"],
    ),
    **{
        f"an engine is not quantized behind the back, {key}": (
            [f"rollout.engine={{{key}: fp8}}"],
            [f"{key} is refused", f"set rollout.{instead} instead"],
            [f"rollout.{instead}=fp8", *TIS],
        )
        for key, instead in (("quantization", "precision"), ("kv_cache_dtype", "kv_cache_dtype"))
    },
    "log-probabilities are those of what is sampled from": (
        ["rollout.engine={logprobs_mode: raw_logprobs}"],
        ["logprobs_mode is refused"],
        ["rollout.engine={seed: 1}"],
    ),
    "drafting has one key": (
        ["rollout.engine={spec_method: ngram, spec_tokens: 3}"],
        ["spec_method is refused", "set rollout.speculation instead"],
        ["rollout.speculation={kind: ngram, num_tokens: 3}"],
    ),
    "the size of an engine has one key": (
        ["rollout.engine={tensor_parallel_size: 2}"],
        ["set rollout.tensor_parallel_size instead"],
        ["rollout.tensor_parallel_size=2"],
    ),
    "float8 has bfloat16 beside it": (
        [*FLOAT8, "trainer.compute_dtype=float32"],
        ["megatron.fp8 tensorwise with compute_dtype float32", "set compute_dtype auto"],
        [*FLOAT8, "trainer.compute_dtype=bfloat16"],
    ),
    "adapters are not trained in float8": (
        [*FLOAT8, "trainer.lora.rank=4"],
        ["megatron.fp8 tensorwise", "set lora.rank 0"],
        ["trainer.strategy=megatron", "trainer.lora.rank=4"],
    ),
    "mbridge is proved without float8": (
        [*FLOAT8, "trainer.megatron.use_mbridge=true"],
        ["fp8 tensorwise with use_mbridge"],
        ["trainer.strategy=megatron", "trainer.megatron.use_mbridge=true"],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_of_float8(file: str, rule: str) -> None:
    wrong, words, right = RULES[rule]
    message = refused(file, *wrong)
    assert all(word in message for word in words), message
    load(Config, [file, *right])
