"""Clients of the rollout, reward and trainer services."""
