"""Holds what the trainer service uses inside Megatron-Core, torch and transformers; see services.common.compat."""
