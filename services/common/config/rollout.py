"""Defines the config section `rollout`: sampling, the engine, speculative decoding, and where replicas are found."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self, cast

from pydantic import AfterValidator, Field, field_validator, model_validator

from services.common.config.base import AT_HOME, Compile, Strict, Table, compiles


class _Speculation(Strict):
    num_tokens: int = Field(default=4, ge=1, le=16)
    """Maximum number of tokens that are drafted for a sample at a time. The engine verifies all of them in one step and
    keeps those up to the first that it rejects."""


class NgramSpeculationConfig(_Speculation):
    kind: Literal["ngram"] = "ngram"
    """Drafts what followed the sample's last tokens where they occurred before, in its prompt or in itself. It needs no
    other model and no GPU memory."""
    min_match: int = Field(default=2, ge=1)
    """Smallest number of last tokens that must have occurred before."""
    max_match: int = Field(default=5, ge=1)
    """Largest number of last tokens that are looked for; the longest match is used."""

    def check_rules(self) -> None:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is above max_match {self.max_match}; make it at most that")

    def for_vllm(self) -> dict[str, object]:
        return {
            "method": "ngram",
            "num_speculative_tokens": self.num_tokens,
            "prompt_lookup_min": self.min_match,
            "prompt_lookup_max": self.max_match,
        }


class SuffixSpeculationConfig(_Speculation):
    kind: Literal["suffix"]
    """Drafts what most often followed the sample's last tokens where they occurred before, in its prompt or in itself
    (suffix decoding). A draft is never longer than the tokens that occurred before. It needs no other model and no GPU
    memory, but the package arctic-inference 0.1.1 on the host of each replica."""
    cached_samples: int = Field(default=0, ge=0, le=1_000_000)
    """Number of the engine's latest samples, of whatever weights, in which the tokens are looked for too. It helps if
    the samples of a prompt group share text. What a seed samples then depends on the other samples, so that a resumed
    run does not repeat the same bits, not even on CPU. 0 looks into no other sample."""
    min_probability: float = Field(default=0.1, ge=0, le=1)
    """Smallest share of the earlier occurrences that must have continued as the draft does."""

    def for_vllm(self) -> dict[str, object]:
        return {
            "method": "suffix",
            "num_speculative_tokens": self.num_tokens,
            "suffix_decoding_max_cached_requests": self.cached_samples,
            "suffix_decoding_min_token_prob": self.min_probability,
        }


class Eagle3SpeculationConfig(_Speculation):
    kind: Literal["eagle3"]
    """Drafts with an EAGLE-3 head, a small model that reads hidden states of the policy. It stays as it is while the
    policy is trained, so fewer of its tokens are accepted as the run goes on."""
    draft: Annotated[Path, AT_HOME]
    """Directory of the head in Hugging Face format, on the host of each replica."""

    def for_vllm(self) -> dict[str, object]:
        return {
            "method": "eagle3",
            "model": str(self.draft),
            "num_speculative_tokens": self.num_tokens,
            "draft_load_config": {"load_format": "auto"},  # unlike the policy's, its weights are never published
        }


SpeculationConfig = Annotated[
    NgramSpeculationConfig | SuffixSpeculationConfig | Eagle3SpeculationConfig, Field(discriminator="kind")
]


class FileDiscoveryConfig(Strict):
    kind: Literal["file"] = "file"
    """Each line of a file is a replica, HOST:PORT; # begins a comment. The file is read whenever it is written or
    replaced, and before each publication."""
    path: Annotated[Path, AT_HOME]
    """The file, on the coordinator's host."""


class DnsDiscoveryConfig(Strict):
    kind: Literal["dns"] = "dns"
    """The replicas are the addresses of a DNS name, such as that of a headless service of Kubernetes. The name is
    resolved before each publication."""
    name: str = Field(min_length=1)
    """The name. With mTLS, the replicas' certificates must be valid for it."""
    port: int = Field(default=50051, ge=1, le=65535)
    """Port of every replica."""


DiscoveryConfig = Annotated[FileDiscoveryConfig | DnsDiscoveryConfig, Field(discriminator="kind")]


MIN_TEMPERATURE = 0.01
"""vLLM raises any temperature between 0 and this to this, and only logs that it did."""
MAX_TOP_K = 1024
"""Largest top_k of samples that are trained on: every token brings the tokens that were kept for it."""
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 1024
"""How many token sequences, with how many tokens together, vLLM takes as bad words."""

MAX_STOP_TOKENS = 128
"""How many stop tokens vLLM's Model Runner V2 can keep from being sampled before min_tokens."""


def _require_exact(temperature: float, *, or_else: str) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"vLLM would sample at {MIN_TEMPERATURE}; set at least that{or_else}")
    return temperature


_Temperature = Annotated[float, Field(ge=0)]
TrainTemperature = Annotated[_Temperature, AfterValidator(partial(_require_exact, or_else=""))]
"""A temperature that the engine uses exactly as given. A run refuses 0 (services/common/config/run.py)."""
EvalTemperature = Annotated[_Temperature, AfterValidator(partial(_require_exact, or_else=", or 0 for greedy decoding"))]
"""A temperature that the engine uses exactly as given; 0 is greedy decoding."""
BadWords = tuple[Annotated[str, Field(min_length=1)], ...]
"""Texts that cannot be sampled."""


class SamplingConfig(Strict):
    """How completions are sampled."""

    temperature: TrainTemperature = 1.0
    """Sampling temperature, at least 0.01. The trainer divides its logits by the same value."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens per completion, including the stop token."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, such as "</search>", in addition to the model's stop tokens. The completion keeps
    the token that completes a text. Special tokens have no text and are refused: set stop_token_ids."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: keep only the most probable tokens whose probabilities sum up to this; 1 keeps all. Needs
    top_k. The engine returns the tokens that it has kept for each token; trainer, reference and teacher normalize over
    them."""
    top_k: int = Field(default=0, ge=0)
    """Keep only this many most probable tokens, at most 1024; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep only tokens with at least this share of the largest probability; 0 keeps all. Needs top_k."""
    min_tokens: int = Field(default=0, ge=0)
    """Sample no stop token, and look for no stop string, before this many tokens. Needs top_k: the trainer must know
    that these tokens could not be sampled, which the sampling masks tell it."""
    bad_words: BadWords = ()
    """Texts that are not sampled: after the other tokens of such a text, its last token cannot be sampled. As in vLLM,
    the text's tokens after a space count too if they are as many; the same text in other tokens can be sampled. Needs
    top_k, like min_tokens."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = ()
    """Tokens that end a completion, in addition to the model's stop tokens. The completion keeps the token. They do not
    change what is sampled."""
    ignore_eos: bool = False
    """Do not end a completion at the model's stop tokens, which are then sampled like all others. It ends at `stop`,
    stop_token_ids or max_tokens."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """Must be 1, and the two below 0: a penalty changes the engine's probabilities but not the trainer's, so that every
    batch would be off-policy. evaluation.sets can set them."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Must be 0, see repetition_penalty."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Must be 0, see repetition_penalty."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @model_validator(mode="before")
    @classmethod
    def _is_known_to_the_trainer(cls, values: object) -> object:
        if isinstance(values, dict) and cast(dict[str, object], values).get("logit_bias"):
            raise ValueError(
                "logit_bias is refused: the trainer's log-probabilities do not have the bias, so every batch would be "
                "off-policy"
            )
        return cast(object, values)

    def check_rules(self) -> None:
        penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        for key, neutral in penalties.items():
            if getattr(self, key) != neutral:
                raise ValueError(
                    f"{key} {getattr(self, key):g} changes the distribution by the tokens before, which the trainer's "
                    f"log-probabilities do not follow; leave it out, or set it in evaluation.sets only"
                )
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} must be at most max_tokens {self.max_tokens}")
        if self.min_tokens and (num_stops := len(set(self.stop_token_ids))) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids has {num_stops} tokens: with min_tokens vLLM takes at most {MAX_STOP_TOKENS} stop "
                "tokens, the model's own included; leave some out, or set min_tokens to 0"
            )
        if not self.is_truncated and (self.min_tokens or self.bad_words):
            key, what = "bad_words", "a token that would complete one cannot be sampled"
            if self.min_tokens:
                key, what = f"min_tokens {self.min_tokens}", "until then no stop token can be sampled"
            raise ValueError(
                f"{key} needs top_k from 1 to {MAX_TOP_K}: {what}, and the trainer learns only from the sampling masks "
                "of truncated sampling which tokens could be"
            )
        if self.is_truncated and not 0 < self.top_k <= MAX_TOP_K:
            raise ValueError(
                f"top_k {self.top_k}: truncated sampling needs top_k from 1 to {MAX_TOP_K}, because every token is "
                "sent with the tokens that were kept for it, and top_p or min_p alone may keep most of the vocabulary; "
                f"set top_k to {MAX_TOP_K}, or top_p to 1, top_k to 0 and min_p to 0"
            )
        if self.is_truncated and self.stop:
            raise ValueError(
                "stop with top_p, top_k or min_p: vLLM does not return the tokens that it kept for a sample that ends "
                "at a stop string; leave stop out, or set top_p to 1, top_k to 0 and min_p to 0"
            )


class RolloutConfig(Strict):
    """The replicas of the policy in vLLM."""

    num_replicas: int = Field(default=1, ge=1)
    """Number of replicas that `lockstep run` starts on this host if no --rollout address is given and `discovery` is
    unset."""
    discovery: DiscoveryConfig | None = None
    """Where to find the replicas. They may change during the run: a new one takes part from the next publication, and
    one that is no longer listed gets no more prompts. Unset, the replicas are those of --rollout, or those started
    here, and `lockstep replicas` changes them."""
    completions_per_prompt: int = Field(default=8, ge=1)
    """Number n of samples per prompt, which form one prompt group."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training completions."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the engine's weights; auto is bfloat16 on GPU and float32 on CPU."""
    precision: Literal["auto", "fp8"] = "auto"
    """Precision of the engine's linear layers and experts. auto: that of `dtype`; fp8: float8 (e4m3), with a scale for
    each output channel of the weights and for each token. The published weights are the same; the engine quantizes what
    it has received. Embedding, output layer, routers and norms keep `dtype`. Needs GPUs of compute capability 8.9 or
    above, and a loss that corrects for the engine's log-probabilities (trainer.loss.correction)."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache. auto: that of `dtype`; fp8: float8 (e4m3) with scale 1, so that it has room for twice
    as many tokens. Needs what precision fp8 needs."""
    max_model_len: int = Field(default=4096, ge=2)
    """Maximum length of prompt plus completion, in tokens (vLLM max_model_len)."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs (or CPU processes) per replica (vLLM tensor_parallel_size). It must divide the model's attention
    heads, and be a divisor or a multiple of the number of its key-value heads."""
    max_samples: int = Field(default=256, ge=1)
    """Maximum number of samples that one engine generates concurrently (vLLM max_num_seqs)."""
    torch_compile: Compile = "auto"
    """Let vLLM compile the model with torch.compile, on GPU only. The engine then starts 4 s later, or half a minute
    the first time on a host, and generates about a tenth faster. Without it, the engine runs vLLM's own kernels, in
    CUDA graphs for steps in which each sample gets one token. auto: in runs of at least 50 steps, in which that
    pays."""
    speculation: SpeculationConfig | None = None
    """Speculative decoding: tokens are drafted cheaply, and the engine verifies several of them in one step. Samples
    keep their distribution and log-probabilities. If unset, the engine generates one token per step."""
    engine: Table = Field(default={})
    """Additional vLLM engine arguments, passed through unchanged. Refused are tensor_parallel_size, speculative_config,
    spec_method, spec_model, spec_tokens, quantization, quantization_config and kv_cache_dtype: set
    tensor_parallel_size, speculation, precision and kv_cache_dtype of this section. So are logprobs_mode and
    logits_processors, which change what log-probabilities mean."""

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Sizes whose product is the number of a replica's workers, each on a GPU of its own, by key."""
        sizes = {"tensor_parallel_size": self.tensor_parallel_size}
        for key in ("pipeline_parallel_size", "data_parallel_size"):
            if isinstance(size := self.engine.get(key), int):
                sizes[f"engine.{key}"] = size
        return sizes

    @property
    def quantized_key(self) -> str:
        """The key by which the engine computes in float8; empty if it does not."""
        keys = {"precision": self.precision, "kv_cache_dtype": self.kv_cache_dtype}
        return next((key for key, value in keys.items() if value == "fp8"), "")

    def for_steps(self, num_steps: int) -> Self:
        """Returns these settings with torch_compile decided for a run of `num_steps`."""
        return self.model_copy(update={"torch_compile": compiles(self.torch_compile, num_steps)})

    def check_rules(self) -> None:
        if self.quantized_key and self.dtype == "float32":
            raise ValueError(
                f"{self.quantized_key} fp8 with dtype float32: vLLM quantizes weights of bfloat16; set dtype to auto"
            )
        if self.quantized_key and self.speculation and self.speculation.kind == "eagle3":
            raise ValueError(
                f"{self.quantized_key} fp8 with speculation.kind eagle3: vLLM's treatment of the head was not checked; "
                "set kind ngram or suffix, or leave speculation out"
            )
        if self.speculation and self.sampling.is_truncated:
            raise ValueError(
                "sampling.top_k with speculation: it was not checked which tokens vLLM keeps for drafted tokens; leave "
                "speculation out, or set sampling.top_p to 1, top_k to 0 and min_p to 0"
            )

    @property
    def can_sleep(self) -> bool:
        """Whether an engine that shares a GPU frees its memory while the trainer works."""
        return self.engine.get("enable_sleep_mode") is not False

    @field_validator("engine")
    @classmethod
    def _known_arguments(cls, engine: Table) -> Table:
        share = engine.get("gpu_memory_utilization", 1.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization: must be a number above 0 and at most 1, not {share!r}")
        if not isinstance(engine.get("enable_sleep_mode", True), bool):
            raise ValueError("enable_sleep_mode: must be true or false")
        own = {"quantization": "precision", "quantization_config": "precision", "kv_cache_dtype": "kv_cache_dtype"}
        if key := next((key for key in own if engine.get(key)), None):
            raise ValueError(
                f"{key} is refused: replicas whose weights were quantized differently must not be served, and the loss "
                f"must correct for what the engine computes; set rollout.{own[key]} instead"
            )
        if "tensor_parallel_size" in engine:
            raise ValueError("tensor_parallel_size is refused: set rollout.tensor_parallel_size instead")
        if key := next((key for key in ("logprobs_mode", "logits_processors") if key in engine), None):
            raise ValueError(
                f"{key} is refused: the trainer's log-probabilities would be those of another distribution than the "
                "engine's; leave it out"
            )
        drafting = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
        if key := next((key for key in drafting if engine.get(key)), None):
            raise ValueError(
                f"{key} is refused: vLLM also has methods that change what is sampled, and some that were not "
                "compared with the trainer; set rollout.speculation instead"
            )
        return engine
