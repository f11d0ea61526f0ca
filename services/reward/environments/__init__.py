"""Environments, one file for each kind."""
