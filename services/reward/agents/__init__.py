"""Runs agents: programs that own their loop and call the policy over HTTP."""
