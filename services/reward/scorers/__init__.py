"""Implements the scorers, one per file. A new scorer also needs a config in common/config/reward/section.py and a line
in run.py."""
