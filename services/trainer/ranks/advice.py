"""Names the config keys to lower when a rank runs out of memory."""

# torch raises a plain RuntimeError if the CPU's allocator fails (c10/core/impl/alloc_cpu.cpp).
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def memory_advice(error: BaseException, role: str) -> str:
    """Returns what to change after an out-of-memory error in a command of `role`; "" after any other error."""
    import torch  # late: commands and their answers need no torch otherwise

    is_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_ALLOCATOR in str(error)
    if not is_memory:
        return ""
    section = "trainer" if role == "policy" else role
    return (
        f"; out of memory: lower {section}.max_tokens_per_microbatch, set trainer.gradient_checkpointing=true, or use "
        "more ranks; `lockstep plan` shows what each phase needs"
    )
