"""Adds up the counts of tokens that speculative decoding drafted for the samples of a step."""

from lockstep.rollout.v1.rollout_pb2 import Drafts


class DraftCounts:
    """Sums counts over groups, until they are taken as metrics."""

    def __init__(self) -> None:
        self._sum = Drafts()

    def add(self, drafts: Drafts) -> None:
        """Adds the counts of one group."""
        for field in drafts.DESCRIPTOR.fields:
            setattr(self._sum, field.name, getattr(self._sum, field.name) + getattr(drafts, field.name))

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call; none if nothing was drafted."""
        taken, self._sum = self._sum, Drafts()
        if not taken.num_drafts:
            return {}
        metrics = {
            "speculation/drafted_tokens": float(taken.num_drafted),
            "speculation/accepted_tokens": float(taken.num_accepted),
            "speculation/accepted_per_draft": taken.num_accepted / taken.num_drafts,
        }
        return metrics | ({"speculation/draft_s": taken.seconds} if taken.seconds else {})
