"""Translates samples between a request and vLLM: prompt and parameters to it, and its output back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.rollout.v1.rollout_pb2 import Drafts
from lockstep.types.v1.types_pb2 import Completion, FinishReason, SamplingParams
from vllm import SamplingParams as EngineSampling
from vllm.config import ModelConfig
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from services.common.config.rollout import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_STOP_TOKENS,
    MAX_TOP_K,
    MIN_TEMPERATURE,
)
from services.common.errors import InternalError, InvalidInput, PreconditionFailed, Reason
from services.common.routed_experts import RoutedExpertsShape
from services.rollout.compat.client import forbid
from services.rollout.compat.recorded import ASKS, masks_of
from services.rollout.compat.scheduler import drafts_of

if TYPE_CHECKING:
    from vllm.inputs import TokensInput

_FINISH = {"stop": FinishReason.FINISH_REASON_STOP, "length": FinishReason.FINISH_REASON_LENGTH}


@dataclass(frozen=True)
class Sample:
    """One completion, and what the engine reports about its prompt."""

    completion: Completion
    prompt_tokens: Sequence[int]
    num_cached_tokens: int
    """Number of prompt tokens that were taken from the prefix cache."""
    drafts: Drafts
    """Counts of drafted tokens; empty without speculative decoding."""
    routed_experts: bytes = b""
    """The experts of all tokens but the last (services.common.routed_experts); empty if there are none."""
    sampling_mask: bytes = b""
    """The sampling masks of its tokens (services.common.batches); empty if they were not asked for."""


def engine_prompt(tokens: Sequence[int], sampling: SamplingParams, model: ModelConfig) -> "TokensInput":
    """Returns a prompt for vLLM, for a sample with the tokens that `sampling` names.

    Raises:
        InvalidInput: It exceeds the engine's context, or one of them the vocabulary.
    """
    if not 0 < len(tokens) < model.max_model_len:
        message = f"prompts: a prompt of {len(tokens)} tokens does not fit max_model_len {model.max_model_len}"
        raise InvalidInput(message, field="prompts")
    named = {
        "prompts": tokens,
        "sampling.stop_token_ids": sampling.stop_token_ids,
        "sampling.bad_words": [token for sequence in sampling.bad_words for token in sequence.tokens],
    }
    vocab_size = model.get_vocab_size()
    for name, ids in named.items():
        if max(ids, default=0) >= vocab_size:  # without a tokenizer vLLM does not check this, and would crash
            raise InvalidInput(f"{name}: token {max(ids)} is outside the vocabulary of {vocab_size}", field=name)
    return {"type": "token", "prompt_token_ids": list(tokens)}


def engine_sampling(sampling: SamplingParams, seed: int) -> EngineSampling:
    """Returns vLLM's parameters for one sample.

    Raises:
        ValueError: vLLM would use another temperature, refuses a value, or could not return the sampling masks.
    """
    least = SamplingParams(temperature=MIN_TEMPERATURE).temperature  # rounded to float32, as in a message
    if 0 < sampling.temperature < least:
        raise ValueError(
            f"temperature {sampling.temperature:g}: must be 0 or at least {MIN_TEMPERATURE}, which vLLM would use"
        )
    if sampling.return_sampling_mask and (
        not sampling.temperature or sampling.stop or not 0 < sampling.top_k <= MAX_TOP_K
    ):
        raise ValueError(
            f"return_sampling_mask: needs a temperature above 0, top_k from 1 to {MAX_TOP_K}, and no stop strings"
        )
    penalties = sampling.repetition_penalty not in (0, 1) or sampling.presence_penalty or sampling.frequency_penalty
    if sampling.return_sampling_mask and penalties:
        raise ValueError("return_sampling_mask: sampling masks do not tell what a penalty has done to the kept tokens")
    lengths = [len(sequence.tokens) for sequence in sampling.bad_words]
    if len(lengths) > MAX_BAD_WORDS or sum(lengths) > MAX_BAD_WORD_TOKENS or not all(lengths):  # the engine would die
        raise ValueError(f"bad_words: at most {MAX_BAD_WORDS}, none empty, of {MAX_BAD_WORD_TOKENS} tokens together")
    if sampling.min_tokens and len(set(sampling.stop_token_ids)) > MAX_STOP_TOKENS:  # as with bad words
        raise ValueError(f"min_tokens: needs at most {MAX_STOP_TOKENS} stop_token_ids, the model's own included")
    translated = EngineSampling(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=list(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        ignore_eos=True,  # only the request's stop tokens end a sample; vLLM would add eos_token_id of config.json
        seed=seed,
        # Of the sampled token alone.
        logprobs=0,
        # Lists for a whole sample, and not a dictionary for each token, which would slow garbage collection down.
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # these parameters are used only once
        extra_args=ASKS if sampling.return_sampling_mask else None,
    )
    return forbid(translated, [sequence.tokens for sequence in sampling.bad_words]) if lengths else translated


def sample_of(output: RequestOutput, seed: int, sampling: SamplingParams, shape: RoutedExpertsShape | None) -> Sample:
    """Returns a finished sample; `shape` is that of the experts that the engine returns, None if it returns none.

    Raises:
        PreconditionFailed: The sample was aborted because the weights changed.
        InternalError: A log-probability is not finite, or masks or experts are missing.
    """
    result = output.outputs[0]
    if result.finish_reason not in _FINISH:
        raise PreconditionFailed(
            f"aborted ({result.finish_reason}) because the weights changed", reason=Reason.NOT_SERVING
        )
    return Sample(
        Completion(
            tokens=result.token_ids, logprobs=_logprobs(result), finish_reason=_FINISH[result.finish_reason], seed=seed
        ),
        output.prompt_token_ids or (),
        output.num_cached_tokens or 0,
        drafts_of(output),
        routed_experts=_experts(output, shape) if shape and sampling.return_routed_experts else b"",
        sampling_mask=masks_of(output) if sampling.return_sampling_mask else b"",
    )


def _logprobs(result: CompletionOutput) -> list[float]:
    assert isinstance(result.logprobs, FlatLogprobs), "flat_logprobs asks for them"
    logprobs = result.logprobs.logprobs[: len(result.token_ids)]  # vLLM 0.26 has those of tokens after a stop string
    if not math.isfinite(sum(logprobs)):
        raise InternalError(
            f"the engine returned {sum(not math.isfinite(one) for one in logprobs)} of {len(logprobs)} "
            "log-probabilities that are not finite; the weights, or vLLM, are broken"
        )
    return logprobs


def _experts(output: RequestOutput, shape: RoutedExpertsShape) -> bytes:
    experts_TLK = output.outputs[0].routed_experts
    num_tokens = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) - 1
    if experts_TLK is None or len(experts_TLK) != num_tokens:
        returned = "no routed experts" if experts_TLK is None else f"routed experts of {len(experts_TLK)} tokens"
        raise InternalError(
            f"vLLM returned {returned} for a sample that it read {num_tokens} tokens of; to train without them, set "
            "trainer.moe.router_replay to off"
        )
    try:
        return shape.encode(experts_TLK)
    except ValueError as error:
        raise InternalError(f"vLLM returned routed experts of another model: {error}") from error
