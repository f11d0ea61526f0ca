"""Lockstep: reinforcement-learning post-training of language models as four services."""

import os

# gRPC logs every handshake that fails, although its caller gets an error that says more. It reads this when it is
# imported. A setting of the user's own stays.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
