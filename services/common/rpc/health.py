"""Checks the health of a service: `lockstep-health HOST:PORT [--tls DIR | --insecure]` exits with 0 if it is serving.

Containers use it as their health check.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import LockstepError
from services.common.rpc.client import Client
from services.common.rpc.tls import Credentials, Transport


async def require_serving(address: str, transport: Transport, *, timeout_s: float) -> None:
    """Checks that the server at `address` as a whole is SERVING (grpc.health.v1)."""
    client = Client(address, health_pb2_grpc.HealthStub, transport)
    try:
        answer = await client.call(
            health_pb2_grpc.HealthServicer.Check, health_pb2.HealthCheckRequest(), timeout_s=timeout_s
        )
    finally:
        await client.close()
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise LockstepError(f"{address} says {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


def main(args: Sequence[str] | None = None) -> None:
    """Runs the check from the command line."""
    parser = argparse.ArgumentParser(prog="lockstep-health", description="Checks that a Lockstep service is serving.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument(
        "--tls", type=Path, metavar="DIR", help="directory with ca.pem, cert.pem and key.pem of any identity"
    )
    parser.add_argument("--insecure", action="store_true", help="allow plaintext to a service on another host")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS")
    options = parser.parse_args(args)
    try:
        transport = Transport(options.tls and Credentials(options.tls), options.insecure)
        asyncio.run(require_serving(options.address, transport, timeout_s=options.timeout))
    except LockstepError as error:
        sys.exit(f"lockstep-health: {error.message}")


if __name__ == "__main__":
    main()
