"""Wraps the internals of Megatron-Core, torch and transformers that the trainer uses; see services.common.compat."""
