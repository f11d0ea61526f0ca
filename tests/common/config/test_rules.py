"""Rules between fields: every error names the keys, and the nearest configs that keep the rule are accepted."""

import pytest

from services.common.config.load import load
from services.common.config.run import Config
from tests.common.config.smallest import SMALLEST, refused

# Overrides that break one rule, what the error must name, and the nearest legal overrides.
KL_ON_OWN_RANKS = ["trainer.loss.kl_coef=0.1", "reference.deployment=own"]
LAG = ["trainer.lag.versions=1", "trainer.loss.kind=grpo", "trainer.loss.old_logprobs=engine"]
GRAPHS = ["trainer.strategy=megatron", "trainer.num_ranks=1"]
LONG = ["data.max_prompt_tokens=100", "rollout.sampling.max_tokens=100"]
HELD = ["data.eval={held: a.jsonl}"]
CROSS_FIELD = {
    "colocated ranks and workers are pairs": (
        ["placement=colocated", "trainer.num_ranks=2", "rollout.tensor_parallel_size=4"],
        ["trainer.num_ranks is 2 and there are 4 workers (rollout.num_replicas 1 x tensor_parallel_size 4)"],
        ["placement=colocated", "trainer.num_ranks=4", "rollout.tensor_parallel_size=2", "rollout.num_replicas=2"],
    ),
    "a learning rate decays by a schedule": (
        ["trainer.optim.min_lr_ratio=0.1", "trainer.optim.decay_steps=10"],
        ["trainer.optim: decay_steps and min_lr_ratio need schedule"],
        ["trainer.optim.min_lr_ratio=0.1", "trainer.optim.decay_steps=10", "trainer.optim.schedule=constant"],
    ),
    "adapters have a rank": (
        ["trainer.lora.alpha=32"],
        ["trainer.lora", "lora needs rank"],
        ["trainer.lora.alpha=32", "trainer.lora.rank=0"],
    ),
    "colocated ranks and workers are pairs, data parallel engines": (
        ["placement=colocated", "trainer.num_ranks=1", "rollout.engine={data_parallel_size: 2}"],
        ["2 workers", "engine.data_parallel_size 2"],
        ["placement=colocated", "trainer.num_ranks=2", "rollout.engine={data_parallel_size: 2}"],
    ),
    "colocated models share the trainer's ranks": (
        ["placement=colocated", "trainer.num_ranks=1", *KL_ON_OWN_RANKS],
        ["reference.deployment own needs GPUs of its own"],
        ["placement=disaggregated", "trainer.num_ranks=1", *KL_ON_OWN_RANKS],
    ),
    "a lag needs two sets of GPUs": (
        ["placement=colocated", "trainer.num_ranks=1", *LAG],
        ["trainer.lag.versions 1", "at the same time"],
        ["placement=disaggregated", "trainer.num_ranks=1", *LAG],
    ),
    "a colocated trainer's weights move": (
        ["placement=colocated", *GRAPHS, "trainer.megatron.transformer_config_kwargs={cuda_graph_impl: local}"],
        ["transformer_config_kwargs.cuda_graph_impl", "leave it out"],
        ["placement=colocated", *GRAPHS, "trainer.megatron.transformer_config_kwargs={cuda_graph_impl: none}"],
    ),
    "colocated replicas cannot come and go": (
        ["placement=colocated", "trainer.num_ranks=1", "rollout.discovery={kind: dns, name: rollout.svc}"],
        ["rollout.discovery", "set placement disaggregated"],
        ["placement=disaggregated", "trainer.num_ranks=1", "rollout.discovery={kind: dns, name: rollout.svc}"],
    ),
    "a colocated engine sleeps or has a share": (
        ["placement=colocated", "trainer.num_ranks=1", "rollout.engine={enable_sleep_mode: false}"],
        ["rollout.engine.enable_sleep_mode false", "set rollout.engine.gpu_memory_utilization"],
        ["placement=colocated", "trainer.num_ranks=1", "rollout.engine={enable_sleep_mode: true}"],
    ),
    "a group of scores ends before its call": (
        ["reward.scorers=[{kind: math}]", "reward.group_timeout_s=300"],
        ["reward.group_timeout_s 300 must be below timeouts.score_s 300"],
        ["reward.scorers=[{kind: math}]", "reward.group_timeout_s=299"],
    ),
    "a lag needs log-probabilities of the weights that were sampled": (
        ["trainer.lag.versions=1"],
        ["lag.versions 1 with loss.old_logprobs recompute", "to engine"],
        ["trainer.lag.versions=1", "trainer.loss.old_logprobs=engine"],
    ),
    "a fused router ignores routed experts": (
        [
            "trainer.moe.router_replay=on",
            "trainer.strategy=megatron",
            "trainer.megatron.transformer_config_kwargs={moe_router_fusion: true}",
        ],
        ["moe.router_replay on", "transformer_config_kwargs.moe_router_fusion"],
        ["trainer.moe.router_replay=on", "trainer.strategy=megatron"],
    ),
    "mbridge builds no layers for adapters": (
        ["trainer.strategy=megatron", "trainer.megatron.use_mbridge=true", "trainer.lora.rank=4"],
        ["megatron.use_mbridge", "set lora.rank to 0"],
        ["trainer.strategy=megatron", "trainer.megatron.use_mbridge=true"],
    ),
    "mbridge reads the model directory": (
        ["trainer.strategy=megatron", "trainer.megatron={use_mbridge: true, dist_checkpointing_path: x}"],
        ["use_mbridge", "dist_checkpointing_path"],
        ["trainer.strategy=megatron", "trainer.megatron.dist_checkpointing_path=x"],
    ),
    "mbridge builds no value models": (
        ["advantage.kind=gae", "critic={}", "trainer.strategy=megatron", "trainer.megatron.use_mbridge=true"],
        ["critic.megatron.use_mbridge", "without it"],
        ["advantage.kind=gae", "trainer.strategy=megatron", "trainer.megatron.use_mbridge=true", "critic.megatron={}"],
    ),
    "routed_experts of drafted tokens were not compared": (
        ["trainer.moe.router_replay=on", "rollout.speculation={kind: ngram}"],
        ["trainer.moe.router_replay on", "leave rollout.speculation out"],
        ["trainer.moe.router_replay=auto", "rollout.speculation={kind: ngram}"],
    ),
    "drafted tokens were not verified with adapters": (
        ["trainer.lora={rank: 8, publish: adapter}", "rollout.speculation={kind: ngram}"],
        ["trainer.lora.publish adapter", "publish to merged"],
        ["trainer.lora={rank: 8, publish: merged}", "rollout.speculation={kind: ngram}"],
    ),
    "a head does not sleep": (
        ["placement=colocated", "trainer.num_ranks=1", "rollout.speculation={kind: eagle3, draft: /head}"],
        ["rollout.speculation.kind eagle3", "set kind ngram or suffix"],
        ["placement=colocated", "trainer.num_ranks=1", "rollout.speculation={kind: suffix}"],
    ),
    "no min_p with speculation": (
        [*HELD, "evaluation.sets={held: {temperature: 1.0, min_p: 0.1}}", "rollout.speculation={kind: ngram}"],
        ["evaluation.sets.held.min_p", "set top_p"],
        [*HELD, "evaluation.sets={held: {temperature: 1.0, top_p: 0.9}}", "rollout.speculation={kind: ngram}"],
    ),
    "sampling masks are bounded": (
        ["rollout.sampling={top_p: 0.9}"],
        ["rollout.sampling", "top_k 0", "set top_k to 1024"],
        ["rollout.sampling={top_p: 0.9, top_k: 1024}"],
    ),
    "tokens that cannot be sampled are known to the trainer": (
        ["rollout.sampling.min_tokens=5"],
        ["rollout.sampling", "min_tokens 5 needs top_k from 1 to 1024"],
        ["rollout.sampling={min_tokens: 5, top_k: 1024}"],
    ),
    "a completion can be as long as it must be": (
        ["rollout.sampling={min_tokens: 9, top_k: 5, max_tokens: 8}"],
        ["min_tokens 9 must be at most max_tokens 8"],
        ["rollout.sampling={min_tokens: 8, top_k: 5, max_tokens: 8}"],
    ),
    "so many stop tokens can be kept from being sampled": (
        [f"rollout.sampling={{min_tokens: 8, top_k: 5, stop_token_ids: {[*range(129)]}}}"],
        ["rollout.sampling", "stop_token_ids has 129 tokens", "at most 128"],
        [f"rollout.sampling={{min_tokens: 8, top_k: 5, stop_token_ids: {[*range(128)]}}}"],
    ),
    "an evaluation's completion can be as long as it must be": (
        [*HELD, "evaluation.sets={held: {min_tokens: 9}}", "rollout.sampling.max_tokens=8"],
        ["evaluation.sets.held: min_tokens 9 must be at most max_tokens 8"],
        [*HELD, "evaluation.sets={held: {min_tokens: 9, max_tokens: 9}}", "rollout.sampling.max_tokens=8"],
    ),
    **{
        f"samples are not drawn with a {key}": (
            [f"rollout.sampling.{key}={wrong}"],
            ["rollout.sampling", f"{key} {wrong} changes the distribution", "evaluation.sets only"],
            [f"rollout.sampling.{key}={neutral}", *HELD, f"evaluation.sets={{held: {{{key}: {wrong}}}}}"],
        )
        for key, wrong, neutral in [
            ("repetition_penalty", 1.1, 1.0),
            ("presence_penalty", 0.5, 0),
            ("frequency_penalty", -0.5, 0.0),
        ]
    },
    "words that cannot be sampled are known to the trainer": (
        ["rollout.sampling.bad_words=[x]"],
        ["rollout.sampling", "bad_words needs top_k from 1 to 1024"],
        ["rollout.sampling={bad_words: [x], top_k: 5}", *HELD, "evaluation.sets={held: {bad_words: [x]}}"],
    ),
    "a bad word has a text": (
        ["rollout.sampling={bad_words: [''], top_k: 5}"],
        ["rollout.sampling.bad_words.0", "at least 1 character"],
        ["rollout.sampling={bad_words: [x], top_k: 5}"],
    ),
    "no bad word is drafted": (
        [*HELD, "evaluation.sets={held: {bad_words: [x]}}", "rollout.speculation={kind: ngram}"],
        ["evaluation.sets.held.bad_words", "no drafted token", "leave it out"],
        [*HELD, "evaluation.sets={held: {bad_words: [x]}}"],
    ),
    "samples are not drawn with a bias": (
        ["rollout.sampling.logit_bias={7: -1}"],
        ["rollout.sampling", "logit_bias is refused", "off-policy"],
        ["rollout.sampling.ignore_eos=true"],
    ),
    **{
        f"turns end as in the template, {key}": (
            [f"rollout.sampling.{key}", "environment={kind: tools, tools: [{kind: calculator}]}"],
            [f"rollout.sampling.{key.partition('=')[0]} with an environment"],
            ["rollout.sampling.stop=[x]", "environment={kind: tools, tools: [{kind: calculator}]}"],
        )
        for key in ("ignore_eos=true", "stop_token_ids=[7]")
    },
    "sampling masks need a top_k with min_p too": (
        ["rollout.sampling={min_p: 0.1, top_k: 1025}"],
        ["top_k 1025", "set top_k to 1024"],
        ["rollout.sampling={min_p: 0.1, top_k: 1024}"],
    ),
    "no sampling masks at stop strings": (
        ["rollout.sampling={top_k: 5, stop: [x]}"],
        ["stop with top_p, top_k or min_p", "leave stop out"],
        ["rollout.sampling={top_k: 5}"],
    ),
    "no sampling masks of drafts": (
        ["rollout.sampling={top_k: 5}", "rollout.speculation={kind: ngram}"],
        ["sampling.top_k with speculation", "leave speculation out"],
        ["rollout.sampling={top_k: 5}"],
    ),
    "a draft has room": (
        [*LONG, "rollout.max_model_len=207", "rollout.speculation={kind: ngram, num_tokens: 4}"],
        ["= 200", "num_tokens 4", "raise that to at least 208"],
        [*LONG, "rollout.max_model_len=208", "rollout.speculation={kind: ngram, num_tokens: 4}"],
    ),
    "an n-gram has a length": (
        ["rollout.speculation={kind: ngram, min_match: 4, max_match: 3}"],
        ["min_match 4 is above max_match 3"],
        ["rollout.speculation={kind: ngram, min_match: 3, max_match: 3}"],
    ),
    "sinkhorn ignores routed experts": (
        [
            "trainer.moe.router_replay=on",
            "trainer.strategy=megatron",
            "trainer.megatron.moe.load_balancing_type=sinkhorn",
        ],
        ["moe.router_replay on", "load_balancing_type sinkhorn"],
        [
            "trainer.moe.router_replay=auto",
            "trainer.strategy=megatron",
            "trainer.megatron.moe.load_balancing_type=sinkhorn",
        ],
    ),
    "stop strings end without routed experts": (
        ["trainer.moe.router_replay=on", "rollout.sampling.stop=[x]"],
        ["trainer.moe.router_replay on", "rollout.sampling.stop"],
        ["trainer.moe.router_replay=auto", "rollout.sampling.stop=[x]"],
    ),
    "groups divide": (
        ["data.prompts_per_step=11", "trainer.num_minibatches=4"],
        ["nearest: 8 or 12, or set num_minibatches to a divisor of 11"],
        ["data.prompts_per_step=12", "trainer.num_minibatches=4"],
    ),
    "groups divide, fewer than mini-batches": (
        ["data.prompts_per_step=3", "trainer.num_minibatches=8"],
        ["nearest: 8, or"],
        ["data.prompts_per_step=8", "trainer.num_minibatches=8"],
    ),
    "a sample for every rank": (
        ["data.prompts_per_step=1", "rollout.completions_per_prompt=2", "trainer.num_ranks=3"],
        ["2 samples", "trainer.num_ranks 3"],
        ["data.prompts_per_step=1", "rollout.completions_per_prompt=3", "trainer.num_ranks=3"],
    ),
    "engine holds the longest": (
        ["rollout.max_model_len=2047"],
        ["rollout.max_model_len", "at least 2048"],
        ["rollout.max_model_len=2048"],
    ),
    "micro-batch holds the longest": (
        ["trainer.max_tokens_per_microbatch=2047"],
        ["trainer.max_tokens_per_microbatch", "at least 2048"],
        ["trainer.max_tokens_per_microbatch=2048"],
    ),
    "long samples spread evenly": (
        ["trainer.num_ranks=3", "trainer.max_tokens_per_microbatch=4095"],
        ["trainer.num_ranks 3", "at least 4096"],
        ["trainer.num_ranks=3", "trainer.max_tokens_per_microbatch=4096"],
    ),
    "a group has a baseline": (
        ["rollout.completions_per_prompt=1"],
        ["rollout.completions_per_prompt must be at least 2"],
        ["rollout.completions_per_prompt=2"],
    ),
    "samples vary": (
        ["rollout.sampling.temperature=0"],
        ["rollout.sampling.temperature must be above 0"],
        ["rollout.sampling.temperature=0.01"],
    ),
    "the engine samples at what is trained at": (
        ["rollout.sampling.temperature=0.0099"],
        ["rollout.sampling.temperature", "vLLM would sample at 0.01; set at least that (from"],
        ["rollout.sampling.temperature=0.01"],
    ),
    "a temperature is finite": (
        ["rollout.sampling.temperature=.inf"],
        ["rollout.sampling.temperature", "finite"],
        ["rollout.sampling.temperature=100"],
    ),
    "evaluation has data": (
        ["evaluation.eval_freq=1"],
        ["evaluation.eval_freq", "data.eval"],
        ["evaluation.eval_freq=1", "data.eval=b.parquet"],
    ),
    "the best is of a set": (
        ["evaluation.eval_freq=2", "data.eval={t: b.parquet}", "evaluation.early_stopping=eval/x/reward"],
        ["evaluation.early_stopping", "data.eval has no x, only t"],
        ["evaluation.eval_freq=2", "data.eval={t: b.parquet}", "evaluation.early_stopping=eval/t/reward"],
    ),
    "the best is of a metric": (
        ["evaluation.eval_freq=2", "data.eval={t: b.parquet}", "evaluation.early_stopping=eval/t/pass@2"],
        ["evaluation.early_stopping.metric eval/t/pass@2: t has no pass@2, only reward, tokens_mean, ", ", exact"],
        ["evaluation.eval_freq=2", "data.eval={t: b.parquet}", "evaluation.early_stopping=eval/t/exact"],
    ),
    "the best is found by evaluations": (
        ["data.eval={t: b.parquet}", "checkpoint={save_freq: 1, keep_best: eval/t/reward}"],
        ["checkpoint.keep_best", "evaluation.eval_freq is 0"],
        ["data.eval={t: b.parquet}", "checkpoint={save_freq: 1, keep_best: eval/t/reward}", "evaluation.eval_freq=1"],
    ),
    "what is evaluated is saved": (
        [
            "data.eval={t: b.parquet}",
            "checkpoint={save_freq: 4, keep_best: {metric: eval/t/reward}}",
            "evaluation.eval_freq=6",
        ],
        ["evaluation.eval_freq 6", "multiple of checkpoint.save_freq 4"],
        ["data.eval={t: b.parquet}", "checkpoint={save_freq: 3, keep_best: eval/t/reward}", "evaluation.eval_freq=6"],
    ),
    "decay has an end": (
        ["trainer.optim.schedule=cosine"],
        ["decay_steps"],
        ["trainer.optim.schedule=cosine", "trainer.optim.decay_steps=10"],
    ),
    "published adapters exist": (
        ["trainer.lora.publish=adapter"],
        ["lora.rank from 1 to 512", "not 0", "lora.publish merged"],
        ["trainer.lora.publish=adapter", "trainer.lora.rank=512", "trainer.strategy=megatron"],
    ),
    "an engine serves the adapters": (
        ["trainer.lora.publish=adapter", "trainer.lora.rank=513", "trainer.strategy=megatron"],
        ["lora.rank from 1 to 512", "not 513"],
        ["trainer.lora.rank=513", "trainer.strategy=megatron"],
    ),
    "adapters are trained without dropout on fsdp": (
        ["trainer.lora.rank=4", "trainer.lora.dropout=0.1"],
        ["lora.dropout", "strategy megatron"],
        ["trainer.lora.rank=4", "trainer.lora.dropout=0.1", "trainer.strategy=megatron"],
    ),
    "decay ends after the warm-up": (
        ["trainer.optim.schedule=linear", "trainer.optim.decay_steps=10", "trainer.optim.warmup_steps=10"],
        ["decay_steps 10", "warmup_steps 10"],
        ["trainer.optim.schedule=linear", "trainer.optim.decay_steps=11", "trainer.optim.warmup_steps=10"],
    ),
}


@pytest.mark.parametrize("rule", CROSS_FIELD)
def test_cross_field_rule(file: str, rule: str) -> None:
    wrong, words, right = CROSS_FIELD[rule]
    message = refused(file, *wrong)
    assert all(word in message for word in words), message
    load(Config, [file, *right])


TP2, GATHERED = "trainer.megatron.tensor_model_parallel_size=2", "trainer.fsdp.reshard_after_forward=false"
MEGATRON = ["trainer.strategy=megatron", "trainer.num_ranks=2"]
OWN = ["trainer.loss.kl_coef=0.1", "reference.deployment=own"]
CRITIC = ["advantage.kind=gae", "critic.strategy=fsdp", "critic.deployment=own"]


@pytest.mark.parametrize(
    ("unused", "key", "used"),
    [
        ([TP2], "trainer.megatron.tensor_model_parallel_size", [*MEGATRON, TP2]),
        (["trainer.megatron.fp8=tensorwise"], "trainer.megatron.fp8", [*MEGATRON, "trainer.megatron.fp8=tensorwise"]),
        (["trainer.megatron.moe.freeze_router=true"], "trainer.megatron.moe.freeze_router", []),
        (["trainer.megatron.ddp_config={a: 1}"], "trainer.megatron.ddp_config.a", []),
        ([*MEGATRON, GATHERED], "trainer.fsdp.reshard_after_forward", [GATHERED]),
        (["reference.megatron.auto_offload=true"], "reference.megatron.auto_offload", []),
        # Inherited by a model that does not read it, or only by one that does.
        ([*MEGATRON, "reference.fsdp.cpu_offload=true"], "reference.fsdp.cpu_offload", [*MEGATRON, TP2, *CRITIC]),
        (
            [*OWN, "reference.strategy=fsdp", TP2],
            TP2.partition("=")[0],
            [*OWN, "reference.strategy=megatron", "reference.num_ranks=2", TP2],
        ),
        (["advantage.kind=gae", "critic.megatron={async_save: true}"], "critic.megatron.async_save", [GATHERED]),
    ],
)
def test_what_the_other_strategy_would_read_is_refused(file: str, unused: list[str], key: str, used: list[str]) -> None:
    section, strategy = key.partition(".")[0], key.split(".")[1]
    assert f"{key} is not used by strategy" in refused(file, *unused)
    assert f"set {section}.strategy={strategy}, or leave it out" in refused(file, *unused)
    load(Config, [file, *used])


def test_default_of_the_other_strategy_may_be_written(file: str) -> None:
    load(
        Config,
        [file, "trainer.megatron={tensor_model_parallel_size: 1, ddp_config: {}, moe: {}}", "reference.megatron={}"],
    )


def test_routes_are_asked_for_where_they_can_be_replayed() -> None:
    assert Config.model_validate(SMALLEST).wants_routed_experts
    for without in (
        {"trainer": {"moe": {"router_replay": "off"}}},
        {"rollout": {"sampling": {"stop": ["x"]}}},
        {"rollout": {"speculation": {"kind": "ngram"}}},
        {"trainer": {"strategy": "megatron", "megatron": {"transformer_config_kwargs": {"moe_router_fusion": True}}}},
        {"trainer": {"strategy": "megatron", "megatron": {"moe": {"load_balancing_type": "sinkhorn"}}}},
    ):
        assert not Config.model_validate(SMALLEST | without).wants_routed_experts


@pytest.mark.parametrize(
    ("value", "num_steps", "compiles"), [("auto", 49, False), ("auto", 50, True), (True, 1, True), (False, 50, False)]
)
def test_layers_are_compiled_in_runs_in_which_it_pays(value: object, num_steps: int, compiles: bool) -> None:
    sections = {"trainer": {"fsdp": {"torch_compile": value}}, "rollout": {"torch_compile": value}}
    critic = {"advantage": {"kind": "gae"}, "critic": {}}
    config = Config.model_validate(SMALLEST | sections | critic | {"num_steps": num_steps})
    assert {name: model.fsdp.torch_compile for name, model in config.models.items()} == dict.fromkeys(
        ("trainer", "critic"), compiles
    )
    assert config.rollout.for_steps(num_steps).torch_compile is compiles
