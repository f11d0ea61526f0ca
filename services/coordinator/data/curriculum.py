"""In which order a step tries prompts: a pure function of (dataset, seed, step) and of recorded success rates."""

from collections.abc import Callable, Iterator, Mapping

from services.common.config.run import Config
from services.common.config.selection import CurriculumConfig
from services.common.errors import InvalidInput
from services.coordinator.data.order import shuffled
from services.coordinator.data.prompts import Prompt, PromptDataset

# Second word of the spawn key. The keys of the epochs' orders have one word.
_REFILLS = 1


def prompts_to_try(
    data: PromptDataset, config: Config, step: int, success_rates: Callable[[int, int | None], Mapping[str, float]]
) -> Iterator[Prompt]:
    """Every prompt of `data` once, in the order in which `step` tries them.

    Args:
        data: The training prompts.
        config: The run's.
        step: Counts from 0.
        success_rates: As Ledger.success_rates.

    Raises:
        InvalidInput: `data` has fewer prompts than a step tries at once.
    """
    require_enough(len(data), config)
    prompts, curriculum = plain_order(data, seed=config.seed, step=step), config.selection.curriculum
    if not curriculum.enabled:
        return prompts
    return by_success_rate(prompts, success_rates(step, curriculum.window), curriculum)


def require_enough(num_prompts: int, config: Config) -> None:
    """Raises InvalidInput if a step would try more than `num_prompts` at once."""
    per_step, over_sampling = config.data.prompts_per_step, config.selection.over_sampling
    if over_sampling.at_once(per_step) > num_prompts:
        raise InvalidInput(
            f"data.prompts_per_step {per_step} x selection.over_sampling.factor {over_sampling.factor:g} = "
            f"{over_sampling.at_once(per_step)} prompts at once, but data.train has {num_prompts}; lower one of them",
            field="selection.over_sampling.factor",
        )


def plain_order(data: PromptDataset, *, seed: int, step: int) -> Iterator[Prompt]:
    """Every prompt of `data` once: the batch of `step`, then the rest in an order that is drawn for this step alone.

    Later steps keep their batches, whatever this one takes of the rest.
    """
    batch = data.batch(step)
    yield from batch
    taken = {prompt.prompt_id for prompt in batch}
    for index in shuffled(len(data), seed, step, _REFILLS).tolist():
        prompt = data.prompts[index]
        if prompt.prompt_id not in taken:
            yield prompt


def by_success_rate(
    prompts: Iterator[Prompt], rates: Mapping[str, float], config: CurriculumConfig
) -> Iterator[Prompt]:
    """`prompts` with those in low..high or without a rate first, then the others, nearest to the band first.

    Args:
        prompts: In the order that is kept among equals.
        rates: Share of samples that passed so far, by prompt id.
        config: Has the band.
    """
    outside: list[tuple[float, Prompt]] = []
    for prompt in prompts:
        rate = rates.get(prompt.prompt_id, config.low)
        distance = max(config.low - rate, rate - config.high)
        if distance > 0:
            outside.append((distance, prompt))
        else:
            yield prompt
    yield from (prompt for _, prompt in sorted(outside, key=lambda pair: pair[0]))
