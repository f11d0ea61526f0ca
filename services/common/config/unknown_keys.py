"""Says for an unknown key which key is meant, or what to set instead if it is a key of another library."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import cast

_MAX_KEYS = 300  # to tell of an unknown table; a whole config of verl has about 250

# Keys of verl, SkyRL, TRL and OpenRLHF, by what to set instead: a key, or its last part if several sections have it.
# A name of several parts comes before its last part. The name of a table stands for all keys in it that are not listed.
_KEYS = {
    "name": "run_name experiment_name",
    "model": "model.path",
    "reference.model": "ref.model.path ref.model",
    "critic.model": "critic.model.path",
    "runs_dir": "output_dir default_local_dir ckpt_path",
    "resume": "resume_from_checkpoint resume_mode resume_from_path resume_path",
    # `trainer.epochs` are passes over the data, unlike trainer.num_epochs.
    "num_steps": "max_steps total_steps total_training_steps trainer.num_train_epochs trainer.epochs total_epochs",
    "num_epochs": "epochs num_train_epochs ppo_epochs",
    "trainer.num_epochs": "num_iterations update_epochs_per_batch",
    "reference.deployment": "colocate_policy_ref",
    "reference.num_ranks": "ref_num_gpus_per_node ref_num_nodes",
    "critic.num_ranks": "critic_num_gpus_per_node critic_num_nodes",
    "data.train": "train_files train_data",
    "data.eval": "val_files val_data",
    "data.prompt_column": "prompt_key",
    "data.chat_template": "custom_chat_template",
    "data.chat_template_kwargs": "apply_chat_template_kwargs generator.chat_template_kwargs",
    "prompts_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "max_prompt_tokens": "max_prompt_length rollout.prompt_length max_input_length",
    "completions_per_prompt": "num_generations group_size n n_samples_per_prompt",
    "max_tokens": "max_new_tokens",
    "rollout.sampling.max_tokens": "max_completion_length max_response_length response_length max_generate_length",
    "rollout.num_replicas": ("num_inference_engines rollout.data_parallel_size inference_engine_data_parallel_size"),
    "rollout.tensor_parallel_size": "rollout.tensor_model_parallel_size inference_engine_tensor_parallel_size",
    "rollout.max_samples": "max_num_seqs",
    "rollout.max_model_len": "engine_init_kwargs.max_model_len",
    "rollout.precision": "rollout.quantization",
    "reward.scorers": "reward_funcs",
    "advantage.kind": "adv_estimator advantage_estimator",
    "advantage.normalize_std": "norm_adv_by_std_in_grpo grpo_norm_by_std",
    "advantage.components": "gdpo_reward_keys gdpo_reward_weights",
    "advantage.lam": "algorithm.lambd",
    "advantage.kl.coef": "kl_ctrl.kl_coef",
    "advantage.kl.kind": "kl_penalty",
    "advantage.kl.target": "kl_ctrl.target_kl kl_ctrl.kl_target kl_ctrl.type",
    "advantage.kl.horizon": "kl_ctrl.horizon",
    "advantage.distill_coef": "distillation_loss_coef",
    "teacher.model": "teacher_model.model_path",
    "selection.dynamic.enabled": "filter_groups.enable dynamic_sampling.type",
    "selection.dynamic.component": "filter_groups.metric",
    "selection.dynamic.max_rounds": "max_num_gen_batches max_sample_batches",
    "selection.over_sampling.factor": "gen_batch_size",
    "selection.overlong.mask_truncated": "apply_overlong_filtering",
    "trainer.lag.versions": "max_staleness_steps",
    "trainer.loss.kind": "loss_mode policy_loss_type",
    "clip_low": "clip_ratio_low eps_clip_low epsilon",
    "clip_high": "clip_ratio_high eps_clip_high epsilon_high",
    "trainer.loss.clip_dual": "clip_ratio_c",
    "kl_coef": "kl_loss_coef beta",
    "trainer.loss.entropy_coef": "entropy_coeff entropy_loss_coef",
    "trainer.loss.correction.weight": "rollout_is tis_ratio_type",
    "trainer.loss.correction.weight_cap": "rollout_is_threshold token_tis_ratio_clip_high sequence_tis_ratio_clip_high",
    "trainer.loss.cispo.max_ratio": "cispo_eps_clip_high",
    "trainer.loss.correction.geometric_mask": "geo_mask_low geo_mask_high",
    "trainer.loss.correction.veto": "outlier_token_is_threshold_low",
    "trainer.loss.clip_cov.min_covariance": "clip_cov_ratio clip_cov.clip_ratio",
    "trainer.loss.kl_cov.min_covariance": "kl_cov_ratio kl_cov_frac",
    "trainer.loss.kl_cov.coef": "ppo_kl_coef",
    "aggregation": "loss_agg_mode loss_reduction loss_type",
    "critic.loss.value_clip": "cliprange_value value_clip",
    "lr": "learning_rate",
    "critic.optim.lr": "critic.optimizer_config.lr",
    "betas": "optim.beta adam_betas",
    "eps": "optim.epsilon",
    "schedule": "lr_scheduler_type warmup_style optimizer_config.scheduler",
    "trainer.optim.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps",
    "trainer.optim.decay_steps": "optim.total_training_steps",
    "max_grad_norm": "grad_clip clip_grad",
    "compute_dtype": "bf16 model_dtype",
    "max_tokens_per_microbatch": "gradient_accumulation_steps ppo_max_token_len_per_gpu",
    "trainer.gradient_checkpointing": "enable_gradient_checkpointing",
    "trainer.lora.rank": "lora_rank",
    "trainer.lora.alpha": "lora_alpha",
    "trainer.moe.router_replay": "router_replay",
    "trainer.fsdp.cpu_offload": "fsdp_config.param_offload fsdp_config.optimizer_offload fsdp_config.offload_policy",
    "trainer.fsdp.torch_compile": "use_torch_compile",
    "trainer.megatron.transformer_config_kwargs": "override_transformer_config",
    "save_freq": "save_steps ckpt_interval",
    "eval_freq": "eval_steps test_freq eval_interval",
    "evaluation.eval_before_train": "val_before_train",
    "evaluation.sets.<name>.num_samples": "val_kwargs.n eval_n_samples_per_prompt num_generations_eval",
    "evaluation.sets.<name>.temperature": (
        "val_kwargs.temperature val_kwargs.do_sample eval_sampling_params.temperature"
    ),
    "evaluation.sets.<name>.top_p": "val_kwargs.top_p eval_sampling_params.top_p",
    "evaluation.sets.<name>.top_k": "val_kwargs.top_k eval_sampling_params.top_k",
    "evaluation.sets.<name>.min_p": "eval_sampling_params.min_p",
    "evaluation.sets.<name>.repetition_penalty": "eval_sampling_params.repetition_penalty",
    "evaluation.sets.<name>.max_tokens": "eval_sampling_params.max_generate_length",
    "max_ckpts_to_keep": "save_total_limit max_actor_ckpt_to_keep",
    "checkpoint.max_critic_ckpts_to_keep": "max_critic_ckpt_to_keep",
    "observability.sample_freq": "log_val_generations",
}
_MICROBATCHES = "leave it out: trainer.max_tokens_per_microbatch bounds each micro-batch, which changes no result"
_ADVICE = {
    "leave it out: there is no such setting": (
        "trust_remote_code use_shm external_lib use_liger use_fused_kernels dataloader_num_workers "
        "filter_overlong_prompts_workers return_raw_chat reward_fn_key val_batch_size eval_batch_size balance_batch "
        "launch_reward_fn_async default_hdfs_dir trainer.device use_legacy_worker_impl ray_init ray_kwargs fsdp_size "
        "save_contents layered_summon load_format calculate_log_probs rollout.name rollout.mode async_engine "
        "run_engines_locally generator.backend generator.batched weight_sync_backend flash_attn enable_http_endpoint "
        "sampling_params.logprobs update_ref_every_epoch rollout.do_sample _target_"
    ),
    "leave it out: samples are packed wherever the attention kernel allows it": "use_remove_padding use_sample_packing",
    "leave it out: mini-batches keep their order": "actor.shuffle critic.shuffle",
    _MICROBATCHES: (
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu use_dynamic_bsz log_prob_use_dynamic_bsz "
        "micro_train_batch_size_per_gpu micro_forward_batch_size_per_gpu forward_micro_batch_size "
        "forward_micro_batch_size_per_gpu"
    ),
    "set placement: colocated if trainer and engines share GPUs": "hybrid_engine colocate_all",
    "set data.overlong: drop": "filter_overlong_prompts",
    "leave it out: no prompt is cut; data.overlong says what happens to a longer one": "data.truncation",
    "set trainer.num_minibatches to data.prompts_per_step divided by it": "ppo_mini_batch_size policy_mini_batch_size",
    "set critic.num_minibatches to data.prompts_per_step divided by it": (
        "critic.ppo_mini_batch_size critic_mini_batch_size"
    ),
    "set trainer.loss.clip_low and trainer.loss.clip_high": "clip_ratio",
    "leave it out: trainer.loss.kl_coef above 0 turns this penalty on": "use_kl_loss",
    "leave it out: trainer.loss.entropy_coef other than 0 turns it on": "use_entropy_loss",
    "leave it out: advantage.kl.coef above 0 turns this penalty on": "use_kl_in_reward",
    "set trainer.loss.kl_kind: k1 (kl), k2 (mse), k3 (low_var_kl) or abs": "kl_loss_type kl_estimator_type",
    "set trainer.loss.correction.weight and trainer.loss.correction.weight_cap": "tis_imp_ratio_cap use_tis",
    "see trainer.loss.correction in docs/algorithms.md": "rollout_correction off_policy_correction",
    "use trainer.megatron.context_parallel_size: strategy fsdp splits no sequence": (
        "ulysses_sequence_parallel_size policy.sequence_parallel_size sequence_parallel_backend"
    ),
    "set critic.warmup_steps to this - 1, or leave out 0": "critic_warmup",
    "set it in rollout.engine, whose keys are arguments of vLLM's engine": (
        "gpu_memory_utilization enforce_eager max_num_batched_tokens enable_chunked_prefill enable_prefix_caching "
        "disable_log_stats engine_kwargs engine_init_kwargs"
    ),
    "leave it out: with placement: colocated, trainer and engine take turns": "free_cache_engine",
    "write an environment, or list tools in one (docs/environments.md)": (
        "multi_turn tool_config_path rollout.agent generator.max_turns"
    ),
    "see selection.dynamic in docs/algorithms.md": "filter_groups dynamic_sampling",
    "see advantage.kl in docs/algorithms.md": "kl_ctrl",
    "name rows in data.train: in parquet, JSON or CSV (docs/own.md)": "custom_cls",
    'write reward.scorers: [{kind: python, path: "MODULE:FUNCTION", kwargs: {}}]': (
        "custom_reward_function reward_kwargs"
    ),
    "list scorers in reward.scorers: math, python, model and others (docs/algorithms.md)": (
        "reward_model reward_manager reward_model.model.path"
    ),
    "write a scorer: {kind: length, target_tokens: N, max_tokens: N} in reward.scorers": (
        "overlong_buffer overlong_buffer_cfg"
    ),
    "set trainer.num_ranks, the number of GPUs that train": (
        "n_gpus_per_node nnodes policy_num_gpus_per_node policy_num_nodes"
    ),
    "write observability.trackers: [{kind: wandb, project: NAME}] or kind: mlflow; files are always written": (
        "trainer.logger project_name"
    ),
    "leave it out: the run's directory has every sample": (
        "rollout_data_dir validation_data_dir dump_eval_results dump_data_batch"
    ),
    "set trainer.profiler.ranks, the ranks to profile": (
        "profiler.enable profiler.all_ranks profiler.tool profiler.tool_config profiler.save_path global_profiler"
    ),
    "use `lockstep eval`": "val_only",
    "use `lockstep export` on a checkpoint": "hf_save_interval export_path",
}


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: meant for meant, names in table.items() for name in names.split()}


_MEANT, _ADVICE_FOR = _by_name(_KEYS), _by_name(_ADVICE)


def explain_unknown(known: Sequence[str], path: str, value: object) -> Iterator[tuple[str, str]]:
    """Yields the unknown keys at `path`, and for each, as the end of a sentence, which key of `known` is meant.

    The keys of an unknown table are told one by one if one of them is a key of another library, or if no known key or
    table is near the table.
    """
    leaves = list(islice(_leaves(path, value), _MAX_KEYS))
    is_other = any(map(_other_name, leaves))
    if len(leaves) > 1 or (is_other and leaves != [path]):
        # A table may have keys that another library has too, such as `n`, and be misspelled all the same.
        meant = _near_table(known, path, cutoff=0.9 if is_other else 0.8)
        if meant := meant or ("" if is_other else suggest(known, path)):
            yield path, f"did you mean {meant}?"
            return
    if len(leaves) == 1 and not _other_name(leaves[0]):
        yield path, _hint(known, leaves[0])
        return
    yield from ((leaf, _hint(known, leaf)) for leaf in leaves)


def _leaves(path: str, value: object) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in cast(Mapping[object, object], value).items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        yield path


def _other_name(path: str) -> str:
    """Returns the name of another library, of up to three parts, that ends last in `path`; "" if it has none."""
    parts = path.lstrip("+~").split(".")  # Hydra adds a key with + and removes one with ~
    ends = range(len(parts), 0, -1)
    spans = (".".join(parts[start:end]) for end in ends for start in range(max(0, end - 3), end))
    return next((span for span in spans if span in _MEANT or span in _ADVICE_FOR), "")


def _hint(known: Sequence[str], path: str) -> str:
    if advice := _ADVICE_FOR.get(_other_name(path)):
        return advice
    meant = suggest(known, path)
    for name, section in (("critic", "critic"), ("ref", "reference")):
        own = f"{section}.{meant.removeprefix('trainer.')}"
        meant = own if name in path.split(".") and meant.startswith("trainer.") and own in known else meant
    return f"did you mean {meant}?" if meant else "`lockstep config` lists every key"


def _near_table(known: Sequence[str], path: str, *, cutoff: float) -> str:
    """Returns the table, or the key with free names in it, that is nearest to `path`; "" if none is near."""
    names = {name for key in known for name in (key, _split(key)[0]) if "[" not in name and "<" not in name}
    return next(iter(difflib.get_close_matches(path, names, n=1, cutoff=cutoff)), "")


def suggest(known: Sequence[str], path: str) -> str:
    """Returns the dotted key of `known` that is nearest to the unknown key `path`, or "" if none is near.

    A key outside of sections that is called like it comes first. If `path` begins with a section that exists, only the
    keys of that section are searched, and then one elsewhere if no other key is called like it. Of equally near keys,
    the first is returned.
    """
    section, (parent, leaf) = path.partition(".")[0], _split(path)
    prefix = f"{section}." if any(key.startswith(f"{section}.") for key in known) else ""
    in_section = [key for key in known if key.startswith(prefix)]
    siblings = [key for key in known if _split(key)[0] == parent]
    leaf = _MEANT.get(_other_name(path), leaf)
    written = f"{parent}.{leaf}" if parent else leaf
    everywhere = [key for key in known if _split(key)[1] == leaf]
    # Without the section, because what all keys have in common makes none of them near.
    by_rest = {key.removeprefix(prefix): key for key in in_section}
    close = difflib.get_close_matches(written.removeprefix(prefix), by_rest, n=1, cutoff=0.8)
    near = by_rest[close[0]] if close else ""
    return (
        (leaf if leaf in known else "")
        or (near if prefix else "")
        or (everywhere[0] if len(everywhere) == 1 else "")
        or _by_leaf(siblings, leaf)
        or _best([key for key in in_section if _split(key)[1] == leaf], parent)
        or near
        or _by_leaf([key for key in in_section if "[" not in key and "<" not in key], leaf)
    )


def _split(path: str) -> tuple[str, str]:
    parent, _, leaf = path.rpartition(".")
    return parent, leaf


def _by_leaf(among: Sequence[str], leaf: str) -> str:
    """Returns the first key whose last part is nearest to `leaf`."""
    by_leaf = {_split(key)[1]: key for key in reversed(among)}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else ""


def _best(among: Sequence[str], parent: str) -> str:
    """Returns the first key whose table is named like `parent`, else the first key. Keys in lists are left out."""
    plain = [key for key in among if "[" not in key and "<" not in key]
    written = parent.rpartition(".")[2]
    return next((key for key in plain if _split(key)[0].endswith(written)), plain[0] if plain else "")
