"""Sets the length of each sample of `benchmarks.rollout` to one of the fixture's lengths, chosen by the sample's seed.

A model with random weights does not end samples as a trained policy would, and a request has one max_tokens for all
samples of its group. Both engines of the comparison therefore change their scheduler: a request ends at its own length.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.lengths import BLOCK, NUM_BLOCKS, read_lengths


def by_seed(mean_tokens: int, shorter_by: int) -> Callable[[int, int], int]:
    """Returns a function (seed, max tokens) -> tokens: one of the fixture's lengths with this mean / `shorter_by`."""
    lengths = [max(1, length // shorter_by) for length in read_lengths(mean_tokens, BLOCK * NUM_BLOCKS)]
    return lambda seed, max_tokens: min(lengths[seed % len(lengths)], max_tokens)


def scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """Returns the rollout service's own scheduler, changed to shorten every new request; for `scheduler_cls`.

    The engine argument `additional_config` has the arguments of `by_seed`.
    """
    from services.rollout.compat.scheduler import scheduler as in_chunks

    return _shortening(in_chunks(vllm_config, **arguments), vllm_config)


def bare_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """Returns the scheduler that vLLM would use, with the same change."""
    from services.rollout.compat.scheduler import kind_of

    return _shortening(kind_of(vllm_config)(vllm_config=vllm_config, **arguments), vllm_config)


def _shortening(made: Any, vllm_config: Any) -> Any:
    # The rollout service may have added keys of its own.
    settings = {name: vllm_config.additional_config[name] for name in ("mean_tokens", "shorter_by")}
    length_of, add_request = by_seed(**settings), made.add_request

    def add_shortened(request: Any) -> None:
        request.max_tokens = length_of(request.sampling_params.seed, request.max_tokens)
        add_request(request)

    made.add_request = add_shortened
    return made
