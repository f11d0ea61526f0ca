"""Imports the scorers of kind python that a config names: `python -m services.reward.probe_scorers`.

Stdin has the config section `reward` as JSON. The exit code is 0 if all can be imported; otherwise it is 1, and stderr
says why.
"""

import asyncio
import sys

from services.common.config.load import parse_json
from services.common.config.reward import RewardConfig
from services.common.errors import LockstepError
from services.reward.run import ScoringRun


async def _probe(config: RewardConfig) -> None:
    named = tuple(scorer for scorer in config.scorers if scorer.kind == "python")
    run = ScoringRun(config.model_copy(update={"scorers": named, "num_workers": 1}))
    try:
        await run.open()
    finally:
        await run.close()


def main() -> None:
    """Starts one worker for each scorer, as a run does, and exits."""
    try:
        asyncio.run(_probe(parse_json(RewardConfig, sys.stdin.read())))
    except LockstepError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
