"""Calls functions of the engine that AsyncLLM has no public method for."""

from vllm.v1.engine.async_llm import AsyncLLM


async def abort_samples(llm: AsyncLLM) -> None:
    """Aborts all samples, and keeps the engine from sampling until `resume_generation`.

    Reason: AsyncLLM.pause_generation would also sleep for 20 ms until the aborted samples have been reported. That is
    not needed here, because each sample reports by itself that it was aborted. Seen with vLLM 0.26.0 and 0.32.0.
    """
    await llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
