"""Grading functions. Most run inside worker processes, because a text can make them hang or crash."""
