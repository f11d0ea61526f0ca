"""Runs the reward service: `lockstep-reward --listen HOST:PORT`, or `python -m services.reward`."""

from services.common.rpc.address import parse_address
from services.common.rpc.command import ServeOptions, serve_from_command_line
from services.common.rpc.server import Server


async def run(options: ServeOptions) -> int:
    from lockstep.reward.v1 import agent_pb2_grpc, environment_pb2_grpc, reward_pb2_grpc

    from services.reward.agents import servicer as agents
    from services.reward.agents.runners import Place
    from services.reward.environments import servicer as environments
    from services.reward.metrics import RewardMetrics
    from services.reward.servicer import NAME, RewardServicer

    registry = options.metrics.registry
    server = Server(options.trace, options.tls, registry)
    host, _ = parse_address(options.listen, field="listen")
    servicer = RewardServicer(RewardMetrics(registry), Place(host, options.tls))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer.environments, server.grpc)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer.agents, server.grpc)
    options.metrics.serve()
    await server.start(options.listen, [NAME, environments.NAME, agents.NAME], insecure=options.insecure)
    try:
        return await server.serve()
    finally:
        await servicer.close()


def main() -> None:
    serve_from_command_line("reward", run)


if __name__ == "__main__":
    main()
