"""Opens an environment and closes it: `python -m services.reward.environments.probe < environment.json`.

stdin is the section `environment` of a config. The exit code is 0 if it opens, and stdout has its version and tools, by
name and as schemas, as JSON; otherwise it is 1, and the last line of stderr says why.
"""

import asyncio
import json
import sys
from collections.abc import Mapping

from services.common.config.environment import EnvironmentConfig, EnvironmentSection
from services.common.config.reading.load import parse_json
from services.reward.environments.base import EpisodeError
from services.reward.environments.kinds import make_environment


async def _probe(config: EnvironmentConfig) -> Mapping[str, object]:
    environment = make_environment(config)
    try:
        await environment.open()
        names = [schema["function"]["name"] for schema in environment.tools]  # type: ignore[index]
        return {"version": environment.version, "tools": names, "schemas": environment.tools}
    finally:
        await environment.close()


def main() -> None:
    """Opens the environment and exits."""
    config = parse_json(EnvironmentSection, sys.stdin.read()).root
    try:
        opened = asyncio.run(_probe(config))
    except EpisodeError as error:
        sys.exit(" ".join(error.detail.split()))
    sys.stdout.write(json.dumps(opened))


if __name__ == "__main__":
    main()
