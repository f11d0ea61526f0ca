# What is used of grpc_health, whose own types are missing.
from grpc_health.v1 import health_pb2_grpc

SERVICE_NAME: str

class aio:
    class HealthServicer(health_pb2_grpc.HealthServicer):
        async def set(self, service: str, status: int) -> None: ...
