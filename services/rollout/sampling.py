"""Translates the sampling parameters of a request to vLLM's."""

from lockstep.types.v1.types_pb2 import SamplingParams
from vllm import SamplingParams as EngineSampling
from vllm.sampling_params import RequestOutputKind

from services.common.config.rollout import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_KEPT, MIN_TEMPERATURE
from services.rollout.compat.vllm.client import forbid
from services.rollout.compat.vllm.kept import ASKS


def named_tokens(sampling: SamplingParams) -> dict[str, list[int]]:
    """Returns the tokens that a request names, by the field's name."""
    bad_words = [token for sequence in sampling.bad_words for token in sequence.tokens]
    return {"sampling.stop_token_ids": list(sampling.stop_token_ids), "sampling.bad_words": bad_words}


def engine_sampling(sampling: SamplingParams, seed: int) -> EngineSampling:
    """Returns vLLM's parameters for one sample.

    Raises:
        ValueError: vLLM would use another temperature, refuses a value, or could not return the kept sets.
    """
    least = SamplingParams(temperature=MIN_TEMPERATURE).temperature  # rounded to float32, as in a message
    if 0 < sampling.temperature < least:
        raise ValueError(
            f"temperature {sampling.temperature:g}: must be 0 or at least {MIN_TEMPERATURE}, which vLLM would use"
        )
    if sampling.return_kept and (not sampling.temperature or sampling.stop or not 0 < sampling.top_k <= MAX_KEPT):
        raise ValueError(f"return_kept: needs a temperature above 0, top_k from 1 to {MAX_KEPT}, and no stop strings")
    penalties = sampling.repetition_penalty not in (0, 1) or sampling.presence_penalty or sampling.frequency_penalty
    if sampling.return_kept and penalties:
        raise ValueError("return_kept: kept sets do not tell what a penalty has done to the kept tokens")
    lengths = [len(sequence.tokens) for sequence in sampling.bad_words]
    if len(lengths) > MAX_BAD_WORDS or sum(lengths) > MAX_BAD_WORD_TOKENS or not all(lengths):  # the engine would die
        raise ValueError(f"bad_words: at most {MAX_BAD_WORDS}, none empty, of {MAX_BAD_WORD_TOKENS} tokens together")
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
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # these parameters are used only once
        extra_args=ASKS if sampling.return_kept else None,
    )
    return forbid(translated, [sequence.tokens for sequence in sampling.bad_words]) if lengths else translated
