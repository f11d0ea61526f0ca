"""What the reward service relies on inside math-verify and sympy; see services.common.compat."""
