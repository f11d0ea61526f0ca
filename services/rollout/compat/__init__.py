"""What the rollout service relies on inside vLLM and torch; see services.common.compat."""
