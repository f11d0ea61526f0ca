"""Implements the environments, one file for each kind."""
