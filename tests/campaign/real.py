"""`python -m tests.campaign.real KIND GATE ...`: runs a real service whose calls pass the gate, if one is given."""

import sys
from functools import partial
from pathlib import Path

from tests.campaign.gate import guard_calls


def serve_trainer(args: list[str], gate: str) -> None:
    """Runs one rank."""
    from services.trainer.command import serve

    if gate:
        guard_calls(Path(gate), "trainer")
    serve(args, 1)


def main() -> None:
    """Runs the service to its end."""
    kind, gate, *args = sys.argv[1:]
    if kind == "trainer":
        from services.trainer.command import run_ranks

        sys.exit(run_ranks(2, partial(serve_trainer, args, gate)))
    if gate:
        guard_calls(Path(gate), kind)
    sys.argv = [kind, *args]
    if kind == "reward":
        from services.reward.__main__ import main as run
    else:
        from services.rollout.__main__ import main as run
    run()


if __name__ == "__main__":
    main()
