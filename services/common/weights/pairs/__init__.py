"""Moves weights between two processes that share a device: a trainer rank and an engine worker, which are a pair."""
