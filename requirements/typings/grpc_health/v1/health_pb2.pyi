# What is used of grpc_health, whose own types are missing.
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

class HealthCheckRequest(Message):
    service: str
    def __init__(self, service: str = ...) -> None: ...

class HealthCheckResponse(Message):
    ServingStatus: EnumTypeWrapper
    SERVING: int
    NOT_SERVING: int
    status: int
