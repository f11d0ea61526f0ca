"""Lockstep: reinforcement-learning post-training of language models as four services."""
