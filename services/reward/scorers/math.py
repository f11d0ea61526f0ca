"""Compares mathematical answers with math-verify (sympy), in worker processes."""

from importlib.metadata import version

from services.common.config.reward.section import MathConfig, RewardConfig
from services.reward.scorers.worker import WorkerScorer


class MathScorer(WorkerScorer):
    """Scores 1 if the last boxed answer equals the dataset's, else 0. See services/reward/graders/math.py."""

    version = f"1/math-verify-{version('math-verify')}"

    def __init__(self, config: MathConfig, run: RewardConfig):
        super().__init__("services.reward.graders.math:grade", {"require_boxed": config.require_boxed}, run)
