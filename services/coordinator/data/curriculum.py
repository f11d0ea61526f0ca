"""Orders the prompts that a step tries: a pure function of (dataset, seed, step) and recorded success rates."""

from collections.abc import Callable, Iterator, Mapping

from services.common.config.run import Config
from services.common.config.selection import CurriculumConfig
from services.common.errors import InvalidInput
from services.coordinator.data.order import shuffled
from services.coordinator.data.prompts import Prompt, PromptDataset

# Second word of the spawn key. The orders of epochs use keys of one word.
REFILLS = 1


def prompts_to_try(
    data: PromptDataset, config: Config, step: int, success_rates: Callable[[int, int | None], Mapping[str, float]]
) -> Iterator[Prompt]:
    """Yields every prompt of `data` once, in the order in which `step` tries them.

    Args:
        data: The training prompts.
        config: The run's config.
        step: Step, counted from 0.
        success_rates: Ledger.success_rates, or a function like it.

    Raises:
        InvalidInput: `data` has fewer prompts than a step tries at once.
    """
    require_enough(len(data), config)
    prompts, curriculum = plain_order(data, seed=config.seed, step=step), config.selection.curriculum
    if not curriculum.enabled:
        return prompts
    return by_success_rate(prompts, success_rates(step, curriculum.window), curriculum)


def require_enough(num_prompts: int, config: Config) -> None:
    """Raises InvalidInput if a step would sample more than `num_prompts` prompts concurrently."""
    per_step, over_sampling = config.data.prompts_per_step, config.selection.over_sampling
    if over_sampling.at_once(per_step) > num_prompts:
        raise InvalidInput(
            f"data.prompts_per_step {per_step} x selection.over_sampling.factor {over_sampling.factor:g} = "
            f"{over_sampling.at_once(per_step)} prompts at once, but data.train has {num_prompts}; lower one",
            field="selection.over_sampling.factor",
        )


def plain_order(data: PromptDataset, *, seed: int, step: int) -> Iterator[Prompt]:
    """Yields every prompt of `data` once: the batch of `step`, then the rest, shuffled for this step only.

    How many of the rest a step takes does not change the batches of later steps.
    """
    batch = data.batch(step)
    yield from batch
    taken = {prompt.prompt_id for prompt in batch}
    for index in shuffled(len(data), seed, step, REFILLS).tolist():
        prompt = data.prompts[index]
        if prompt.prompt_id not in taken:
            yield prompt


def by_success_rate(
    prompts: Iterator[Prompt], rates: Mapping[str, float], config: CurriculumConfig
) -> Iterator[Prompt]:
    """Yields prompts with a rate in low..high or with no rate first, then the others, nearest to that band first.

    Args:
        prompts: Prompts; their order is kept among equals.
        rates: Fraction of samples that passed so far, by prompt id.
        config: Has the band, low and high.
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
