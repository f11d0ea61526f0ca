"""Holds what the reward service uses inside math-verify and sympy; see services.common.compat."""
