"""Calls the rollout, reward and trainer services."""
