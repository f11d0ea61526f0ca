"""Trains Hugging Face models, sharded by torch's fully_shard (FSDP2)."""
