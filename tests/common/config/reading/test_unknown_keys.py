"""Tests that an error about an unknown key names the right one, also for keys of other libraries."""

import json
import re
from collections.abc import Iterator

import pytest

from services.common.config import unknown_keys
from services.common.config.load import keys
from services.common.config.run import Config
from tests.common.config.smallest import refused
from tests.support import ROOT

KNOWN = [key.path for key in keys(Config)]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("optim.learning_rate", "trainer.optim.lr"),
        ("trainer.optim.learning_rate", "trainer.optim.lr"),
        ("learning_rate", "trainer.optim.lr"),
        ("lr", "trainer.optim.lr"),
        ("temperature", "rollout.sampling.temperature"),
        ("data.batch_size", "data.prompts_per_step"),
        ("rollout.n", "rollout.completions_per_prompt"),
        ("rollout.tensor_model_parallel_size", "rollout.tensor_parallel_size"),  # as Megatron's key is called
        ("gradient_accumulation_steps", "trainer.max_tokens_per_microbatch"),
        ("beta", "trainer.loss.kl_coef"),  # which had been taken for optim.betas
        ("trainer.optim.beta", "trainer.optim.betas"),
        ("trainer.optim.epsilon", "trainer.optim.eps"),
        ("trainer.bf16", "trainer.compute_dtype"),
        ("num_iterations", "trainer.num_epochs"),
        ("trainer.test_freq", "evaluation.eval_freq"),  # no other key is called eval_freq
        ("trainer.max_steps", "num_steps"),
        ("trainer.profiler.rank", "trainer.profiler.ranks"),  # of which trainer.lora has one
        ("data.max_response_length", "rollout.sampling.max_tokens"),
        ("trainer.max_completion_length", "rollout.sampling.max_tokens"),
        ("trainer.num_train_epochs", "num_steps"),
        ("trainer.total_epochs", "num_steps"),
        ("critic.optim.warmup_ratio", "critic.optim.warmup_steps"),
        ("critic.optim.total_training_steps", "critic.optim.decay_steps"),
        ("trainer.critic.optimizer_config.adam_betas", "critic.optim.betas"),
        ("actor_rollout_ref.ref.strategy", "reference.strategy"),
        ("actor_rollout_ref.ref.model", "reference.model"),
        ("actor_rollout_ref.ref.model.path", "reference.model"),
        ("actor_rollout_ref.ref.use_torch_compile", "trainer.fsdp.torch_compile"),
        ("generator.eval_sampling_params.min_p", "evaluation.sets.<name>.min_p"),
        ("selection.kind", None),  # keys of this name elsewhere have nothing to do with it
    ],
)
def test_a_name_of_another_trainer_or_of_another_table_is_recognized(file: str, wrong: str, right: str | None) -> None:
    message = refused(file, f"{wrong}=1")
    assert (f"did you mean {right}?" if right else "lists every key") in message


def test_each_key_of_another_librarys_command_has_a_line(file: str) -> None:
    message = refused(
        file,
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "+actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "custom_reward_function={path: my_reward.py, name: compute_score}",
        "trainer.device=cuda",
        "actor_rollout_ref.actor._target_=verl.workers.config.FSDPActorConfig",
        "actor_rollout_ref.actor.profiler.enable=false",
        "actor_rollout_ref.rollout.do_sample=true",
    )
    assert message.startswith("10 problems:")
    for line in (
        "actor_rollout_ref.rollout.n: unknown key (from command line); did you mean rollout.completions_per_prompt?",
        "actor.ppo_mini_batch_size: unknown key (from command line); set trainer.num_minibatches to data.prompts_per",
        "actor_rollout_ref.actor.optim.lr: unknown key (from command line); did you mean trainer.optim.lr?",
        "actor.fsdp_config.param_offload: unknown key (from command line); did you mean trainer.fsdp.cpu_offload?",
        "custom_reward_function.name: unknown key (from command line); write reward.scorers: [{kind: python",
        "trainer.device: unknown key (from command line); leave it out",
        "actor._target_: unknown key (from command line); leave it out",
        "actor.profiler.enable: unknown key (from command line); set trainer.profiler.ranks",
        "rollout.do_sample: unknown key (from command line); leave it out",
    ):
        assert line in message


def test_a_misspelled_table_is_one_line_if_its_name_is_near(file: str) -> None:
    assert refused(file, "data.evel={a: a.parquet, b: b.parquet}").endswith("did you mean data.eval?")
    assert refused(file, "traner={num_ranks: 2, optim: {lr: 1}}").endswith("did you mean trainer?")
    # Keys of the table that another library or a kind has too do not hide that its name is misspelled.
    assert refused(file, "evaluation.set={a: {n: 1}, b: {n: 2}}").endswith("did you mean evaluation.sets?")
    assert refused(file, "trainer.loss.kwarg={a: 1, b: 2}").endswith("did you mean trainer.loss.kwargs?")
    assert "[agent]" not in refused(file, "environment={kind: agent, command: [a], tool: {x: 1, y: 2}}")
    message = refused(file, "quux={num_ranks: 2, optim: {lr: 1}}")
    assert message.startswith("2 problems:")
    assert "quux.optim.lr: unknown key (from command line); did you mean trainer.optim.lr?" in message


@pytest.mark.timeout(60)
def test_a_huge_unknown_table_is_told_in_part(file: str) -> None:
    table = {f"key{index}": {"deep": {"n": 1}} for index in range(1_000)}
    assert refused(file, f"nope={json.dumps(table)}").startswith("300 problems:")


def test_advice_names_keys_that_exist() -> None:
    named = {name for advice in unknown_keys._ADVICE for name in re.findall(r"\b[a-z_]+\.[a-z_.]+[a-z]", advice)}
    assert len(named) > 10
    for name in {*named, *unknown_keys._KEYS} - {"algorithms.md", "environments.md", "own.md"}:
        assert any(key == name or key.endswith(f".{name}") or key.startswith(f"{name}.") for key in KNOWN), name


def rows_of_the_manual() -> Iterator[tuple[str, list[str]]]:
    """Yields each key of verl and SkyRL in the table of docs/migration.md, and Lockstep's keys beside it."""
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    section = page.partition("## Keys side by side\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (`.*)", section, re.MULTILINE):
        ours, verl, skyrl, *_ = row.split("|")
        keys_here = [name.partition(":")[0] for name in re.findall("`([^`]+)`", ours)]
        for name in re.findall(r"`([a-z_.]+)(?:: [^`]*)?`", f"{verl} {skyrl}"):
            yield name, keys_here


def test_the_keys_of_the_manuals_table_are_recognized() -> None:
    rows = list(rows_of_the_manual())
    # Values, and tables whose keys the row is about.
    no_keys = {"fp8", "geo_mean", "step"}
    no_keys |= {name for name, _ in rows if name.endswith(("_transformer_config", "config_kwargs", "megatron_config"))}
    names = {name for name, _ in rows} - {*KNOWN, *no_keys}
    assert len(names) > 80
    missed = list[str]()
    for name in names:
        ((_, told),) = unknown_keys.explain_unknown(KNOWN, name, 1)
        ours = [key for other, keys_here in rows if other.endswith(name) for key in keys_here]
        parts = {part for key in ours for part in (key.rpartition(".")[2], key.rpartition(".")[0]) if part}
        if not any(part in told for part in parts):
            missed.append(f"{name}: {told}, not {ours}")
    assert not missed
