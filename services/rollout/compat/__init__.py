"""Holds the rollout service's uses of vLLM and torch internals; see services.common.compat."""
