"""Implements the tools that a policy can call."""
