"""Tools that a policy can call."""
