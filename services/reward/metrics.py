"""The Prometheus metrics of the reward service."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class RewardMetrics:
    def __init__(self, registry: CollectorRegistry | None = None):
        self.scores = Counter(
            "lockstep_reward_scores_total",
            "Samples by scorer and outcome: scored, or the reason why there is no score.",
            ["scorer", "outcome"],
            registry=registry,
        )
        self.queue = Gauge(
            "lockstep_reward_queue_samples", "Samples that were received and are not scored yet.", registry=registry
        )
        self.episodes = Gauge(
            "lockstep_reward_episodes_open", "Episodes that hold something of the environment.", registry=registry
        )
        self.environment_seconds = Histogram(
            "lockstep_reward_environment_seconds",
            "Seconds that the environment took for a reset or a step.",
            ["call"],
            registry=registry,
        )
        self.environment_failures = Counter(
            "lockstep_reward_environment_failures_total",
            "Episodes that the environment failed to begin or to continue, by reason.",
            ["reason"],
            registry=registry,
        )
        self.tool_calls = Counter(
            "lockstep_reward_tool_calls_total",
            "Calls of tools by outcome: ok, malformed, refused (no such tool, or wrong arguments), or the class of the "
            "exception that the tool raised.",
            ["outcome"],
            registry=registry,
        )
