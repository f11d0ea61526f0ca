"""Calls functions of the engine that AsyncLLM has no public method for, and sets parameters without a public name."""

import asyncio
from collections.abc import Iterator, Sequence

from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError


async def abort_samples(llm: AsyncLLM) -> None:
    """Aborts all samples, and keeps the engine from sampling until `resume_generation`.

    Reason: AsyncLLM.pause_generation would also sleep for 20 ms until the aborted samples have been reported. That is
    not needed here, because each sample reports by itself that it was aborted. Seen with vLLM 0.26.0 and 0.32.0.
    """
    await llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)


def forbid(sampling: SamplingParams, sequences: Sequence[Sequence[int]]) -> SamplingParams:
    """Returns `sampling` without tokens that would complete one of `sequences`.

    Reason: vLLM's `bad_words` are texts, which it splits with a tokenizer that the engines do not load. Seen with vLLM
    0.32.0.
    """
    sampling._bad_words_token_ids = [list(tokens) for tokens in sequences]
    return sampling


def lengths_so_far(llm: AsyncLLM) -> Iterator[tuple[str, int]]:
    """Yields the request id of each unfinished sample, and the number of its tokens that have arrived.

    Reason: a sample is returned only when it is finished, because answers for every token would cost time. vLLM counts
    the tokens, but has no method that tells. Seen with vLLM 0.26.0 and 0.32.0.
    """
    for state in llm.output_processor.request_states.values():
        yield state.external_req_id, state.detokenizer.num_output_tokens() if state.detokenizer else 0


async def stop_reading(llm: AsyncLLM) -> None:
    """Ends the task that reads the engine's outputs; samples in progress fail with EngineDeadError. Call it before
    `shutdown`.

    Reason: AsyncLLM.shutdown ends the engine first, and its task then logs the end as an error with a traceback. Seen
    with vLLM 0.26.0 and 0.32.0.
    """
    if llm.output_handler is not None:  # it is started with the first request
        llm.output_handler.cancel()
        await asyncio.wait({llm.output_handler})
    llm.output_processor.propagate_error(EngineDeadError())
