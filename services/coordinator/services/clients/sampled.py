"""Makes a sampled group of what a replica has answered."""

from collections.abc import Sequence

from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import SamplingParams

from services.common.batches.batch import tokens_sha256
from services.common.batches.route_parts import from_parts
from services.common.errors import InternalError, Reason
from services.coordinator.data.groups import SampledGroup
from services.coordinator.data.prompts import Prompt


def require_kept(group: SampledGroup, sampling: SamplingParams, address: str) -> None:
    """Raises InternalError if a replica has returned no kept sets although they were asked for."""
    if sampling.return_kept and not group.kept:
        raise InternalError(f"replica {address} returned no kept sets; update its service")


def sampled_group(index: int, prompt: Prompt, num_samples: int, answers: Sequence[pb.GenerateResponse]) -> SampledGroup:
    """Returns the group in the answers of one replica.

    Raises:
        InternalError: The group is incomplete; PROMPT_MISMATCH, the engine used other prompt tokens.
    """
    if not answers or len(answers[-1].completions) != num_samples or any(part.completions for part in answers[:-1]):
        raise InternalError(f"a replica returned an incomplete group for prompt {prompt.prompt_id}")
    answer = answers[-1]
    sent, seen = tokens_sha256(prompt.tokens), answer.prompt_sha256
    if (answer.prompt_num_tokens, seen) != (len(prompt.tokens), sent):
        raise InternalError(
            f"prompt {prompt.prompt_id} was sent as {len(prompt.tokens)} tokens (SHA-256 {sent[:8]}), but the engine "
            f"used {answer.prompt_num_tokens} tokens ({seen[:8] or 'no SHA-256'})",
            reason=Reason.PROMPT_MISMATCH,
        )
    return SampledGroup(
        index,
        prompt,
        answer.completions,
        answer.stamp,
        drafts=answer.drafts,
        num_cached_tokens=answer.num_cached_tokens,
        routes=from_parts((part for message in answers for part in message.routes), num_samples),
        kept=from_parts((part for message in answers for part in message.kept), num_samples),
    )
