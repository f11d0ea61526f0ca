"""`lockstep-health HOST:PORT`: exit code 0 if the gRPC service there says that it serves. For container probes."""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(address: str, *, timeout_s: float) -> bool:
    """Whether the whole server at `address` is SERVING (grpc.health.v1)."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=False)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="lockstep-health", description="Asks a Lockstep service whether it serves.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS")
    options = parser.parse_args()
    sys.exit(not is_serving(options.address, timeout_s=options.timeout))
