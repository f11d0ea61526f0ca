"""The rollout service's uses of vLLM internals; see services.common.compat."""
