# What is used of grpc_health, whose own types are missing.
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

class HealthStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...

class HealthServicer:
    async def Check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse: ...

def add_HealthServicer_to_server(servicer: HealthServicer, server: grpc.aio.Server) -> None: ...
