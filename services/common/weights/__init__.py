"""Publishes weights: the tensors to send (plan), their bytes and hash (buckets), and the members (group, pairs)."""
