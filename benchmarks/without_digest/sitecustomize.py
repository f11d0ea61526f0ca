"""Python imports this when it starts with this folder on PYTHONPATH: weights are sent and loaded without being hashed.

Only `benchmarks.sync --without-digest` does so, to measure what hashing costs.
"""

from services.common.weights.digest import WeightDigest

WeightDigest.update = lambda self, flat, *, start: None
