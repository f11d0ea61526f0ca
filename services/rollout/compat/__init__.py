"""Holds what the rollout service uses inside vLLM and torch; see services.common.compat."""
