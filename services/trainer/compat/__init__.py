"""What the trainer relies on inside Megatron-Core, torch and transformers; see services.common.compat."""
