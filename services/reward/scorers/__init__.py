"""Scorers, one file each. A new one also needs a config in common/config/reward/section.py and a line in run.py."""
