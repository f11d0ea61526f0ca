"""Asks the engine for what AsyncLLM has no public method for."""

from vllm.v1.engine.async_llm import AsyncLLM


async def abort_samples(llm: AsyncLLM) -> None:
    """Aborts what is sampled, and keeps the engine from sampling until `resume_generation`.

    Reason: AsyncLLM.pause_generation would also sleep 20 ms, to let aborted samples be reported first. Nobody waits for
    that here: each of them says itself that it was aborted. Seen with vLLM 0.26.0 and 0.32.0.
    """
    await llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
