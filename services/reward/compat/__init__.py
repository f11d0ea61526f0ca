"""The reward service's uses of math-verify and sympy internals; see services.common.compat."""
