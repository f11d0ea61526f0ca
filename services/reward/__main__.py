"""`python -m services.reward --listen HOST:PORT`: starts with an address; the config comes with OpenRun."""

from lockstep.reward.v1 import reward_pb2_grpc

from services.common.rpc import Server
from services.common.serve import ServeOptions, serve_from_command_line
from services.reward.servicer import NAME, RewardServicer


async def run(options: ServeOptions) -> int:
    """Serves until a signal."""
    server, servicer = Server(), RewardServicer()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
    await server.start(options.listen, [NAME], insecure=options.insecure)
    code = await server.serve()
    await servicer.close()
    return code


if __name__ == "__main__":
    serve_from_command_line("reward", run)
