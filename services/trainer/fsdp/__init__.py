"""FSDP2: a Hugging Face model sharded by torch's fully_shard."""
