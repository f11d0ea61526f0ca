"""Makes small real models and batches for the tests, and starts and watches real service processes."""

import asyncio
import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches import NO_TOKEN, SAMPLE_SCHEMA, decode_sampling_masks, encode_sampling_masks, encode_top_k
from services.common.errors import LockstepError, Reason

if TYPE_CHECKING:
    import pytest

ErrorT = TypeVar("ErrorT", bound=LockstepError)

PATIENCE_S = 120.0
"""How long a test waits for an event before it fails. A test that passes never waits that long."""
LIMITS_S = (1.0, 8.0, 64.0)
"""Time limits for tests whose subject is a limit: if a busy machine misses one, the test tries the next."""
SMALL_CACHE = {"kv_cache_memory_bytes": 1 << 26}
"""Arguments of an engine, which zeroes its KV cache when it starts: a quarter of the default. No test fills it."""
# Below the ports that the project's own code chooses from and those that Linux gives to outgoing connections.
_PORTS = range(10_000, 20_000)
_claims: list[socket.socket] = []

VOCAB = 64
EOS = 1
# vLLM's CPU attention wants a head size that is a multiple of 32.
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
    # Wide enough that greedy choices are not ties.
    "initializer_range": 0.1,
}

ROOT = Path(__file__).parents[1]
"""Root of the repository."""


# In these families, the head size is the hidden size divided by the number of heads.
_OTHER_SHAPE = {key: value for key, value in _SHAPE.items() if key != "head_dim"} | {"hidden_size": 128}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64}
# The sizes of latents that vLLM has a kernel for on CPU, where it also computes only YaRN's rotary embedding right.
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 48}
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_LATENT,
        "num_key_value_heads": 4,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        # The keys of published models that only vLLM reads.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 96},
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},  # vLLM reads the betas
    },
    # Its first layer is dense.
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "attention_bias": True,
        "use_qk_norm": True,
        "head_dim": 32,  # which vLLM reads
    },
}


_OTHER_QWEN3: dict[str, dict[str, Any]] = {
    "deep": {"num_hidden_layers": 4},
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
    },
}


def make_model(directory: Path, kind: str) -> Path:
    """Writes a random model of `kind` with a character tokenizer.

    `untied`, `tied` and `moe` are Qwen3 models of 2 layers; `deep` and `deep-moe` have 4. `qwen3-0.6b`, for GPUs, has
    the shape of the real model of that name. The names in OTHER_FAMILIES are other families.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    if kind in OTHER_FAMILIES:
        shape = _OTHER_SHAPE | OTHER_FAMILIES[kind]
        config = AutoConfig.for_model(kind, **shape, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            vectors = (one for name, one in model.named_parameters() if one.ndim == 1 or name.endswith("bias"))
            for vector in vectors:
                vector += 0.2 * torch.randn(vector.shape)  # a vector of only 1 or 0 hides a mistake in its place
            for bias in (one for name, one in model.named_buffers() if name.endswith("correction_bias")):
                bias += 0.2 * torch.randn(bias.shape)
    elif kind in ("moe", "deep-moe"):
        shape = _SHAPE | ({"num_hidden_layers": 4} if kind == "deep-moe" else {})
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **_EXPERTS, tie_word_embeddings=False))
    else:
        shape = _SHAPE | _OTHER_QWEN3.get(kind, {})
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=kind in ("tied", "qwen3-0.6b")))
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<pad>": 0, "<eos>": EOS}
    for character in "0123456789+-= ":
        vocab[character] = len(vocab)
    for index in range(len(vocab), VOCAB):
        vocab[chr(0x4E00 + index)] = index
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_batch(num_groups: int, group_size: int, stamp: PolicyStamp, *, seed: int = 0) -> pa.Table:
    """Returns random samples of uneven length with advantages, and log-probabilities of a uniform behavior policy."""
    random = np.random.default_rng(seed)
    rows = []
    for group in range(num_groups):
        prompt = random.integers(2, VOCAB, random.integers(3, 9)).tolist()
        for sample in range(group_size):
            tokens = random.integers(2, VOCAB, random.integers(2, 17)).tolist()
            rows.append(
                {
                    "prompt_id": f"p{group}",
                    "group": group,
                    "sample": sample,
                    "prompt_tokens": prompt,
                    "tokens": tokens,
                    "logprobs": [-float(np.log(VOCAB))] * len(tokens),
                    "reward": 0.0,
                    "components": [],
                    "advantages": [float(random.normal())] * len(tokens),
                    "finish_reason": "stop",
                    "policy_version": stamp.version,
                    "policy_digest": stamp.digest,
                    "scorer": "test",
                    "seed": sample,
                }
            )
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def with_routed_experts(samples: pa.Table, *, num_layers: int = 2) -> pa.Table:
    """Returns the samples with random routed experts of the model kind `moe`: two different experts of four."""
    random = np.random.default_rng(0)
    routed_experts = []
    for row in samples.to_pylist():
        num_rows = len(row["prompt_tokens"]) + len(row["tokens"]) - 1
        order = random.random((num_rows, num_layers, _EXPERTS["num_experts"])).argsort(-1)
        routed_experts.append(order[..., : _EXPERTS["num_experts_per_tok"]].astype(np.uint8).tobytes())
    index = samples.schema.get_field_index("routed_experts")
    return samples.set_column(index, samples.schema.field(index), pa.array(routed_experts, pa.large_binary()))


def with_sampling_masks(samples: pa.Table) -> pa.Table:
    """Returns the samples with random sampling masks of up to eight tokens; masked tokens have some too, or none."""
    random = np.random.default_rng(0)
    rows = []
    for row in samples.to_pylist():
        sets: list[list[int]] = []
        for token, is_trained in zip(row["tokens"], row["loss_mask"] or [True] * len(row["tokens"]), strict=True):
            others = random.choice(VOCAB, random.integers(8), replace=False).tolist()
            sets.append(sorted({token, *others}) if is_trained or random.random() < 0.5 else [])
        rows.append(encode_sampling_masks(sets))
    index = samples.schema.get_field_index("sampling_mask")
    return samples.set_column(index, samples.schema.field(index), pa.array(rows, pa.large_binary()))


def with_teacher_top_k(samples: pa.Table, *, k: int = 6) -> pa.Table:
    """Returns the samples with a random teacher's k tokens at each place, of the sampling mask if there is one."""
    random = np.random.default_rng(5)
    rows = []
    for row in samples.to_pylist():
        num_tokens = len(row["tokens"])
        tokens_TK, probs_TK = np.full((num_tokens, k), NO_TOKEN), random.dirichlet(np.ones(k + 1), num_tokens)
        counts, allowed = np.zeros(num_tokens, int), np.zeros(0, int)
        if row["sampling_mask"]:
            counts, allowed = decode_sampling_masks(row["sampling_mask"], num_tokens)
        for place, mask in enumerate(np.split(allowed, np.cumsum(counts)[:-1])):
            chosen = random.permutation(mask if len(mask) else VOCAB)[:k]
            tokens_TK[place, : len(chosen)] = chosen
        probs_TK[:, :k][tokens_TK < 0] = 0
        probs_TK[(counts > 0) & (counts <= k), k] = 0
        probs_TK /= probs_TK.sum(1, keepdims=True)
        logprobs_TK = np.log(probs_TK, out=np.full_like(probs_TK, -1e30), where=probs_TK > 0)
        logprobs_TK[:, :k][tokens_TK < 0] = 0
        rows.append(encode_top_k(tokens_TK, logprobs_TK))
    index = samples.schema.get_field_index("teacher_top_k")
    return samples.set_column(index, samples.schema.field(index), pa.array(rows, pa.large_binary()))


@contextlib.contextmanager
def raises(
    error: type[ErrorT], *, reason: Reason | None = None, field: str | None = None
) -> Iterator["pytest.ExceptionInfo[ErrorT]"]:
    """Asserts that the block raises `error` with this reason, by default that of its class, and naming this field.

    Use pytest's own `match` where the text itself is what is tested.
    """
    import pytest

    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.reason is (reason or error.default_reason), caught.value
    assert caught.value.metadata.get("field") == field or field is None, caught.value


def free_port() -> int:
    """Returns a free port of loopback, and reserves it among the test processes of this host until this one ends."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0lockstep-tests-port-{port}")  # held until this process ends
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
        else:
            _claims.append(claim)
            return port
    raise AssertionError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


async def until(condition: Callable[[], object]) -> None:
    """Waits until `condition` holds, where there is no event to wait for.

    Raises:
        TimeoutError: It did not within PATIENCE_S.
    """
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def service_command(service: str, address: str, *flags: str, num_ranks: int = 1) -> list[str]:
    """Returns the command with which an operator starts `service`."""
    ranks = ["--nproc-per-node", str(num_ranks)] if service == "trainer" else []
    return [sys.executable, "-m", f"services.{service}", "--listen", address, *ranks, *flags]


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process that is ended, by its pid, with the block. Its environment gets `variables` in addition."""
    with log.open("ab") as output:
        env = os.environ | (variables or {})
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
    with ending(process):
        yield process


class _Process(Protocol):
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@contextlib.contextmanager
def ending(process: _Process) -> Iterator[None]:
    """Ends the process with the block."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def descendants(pid: int) -> dict[int, str]:
    """Returns every living process below `pid`, with its command line."""
    found: dict[int, str] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found |= {child: command} | descendants(child)
    return found


def engine_of(replica: int) -> int:
    """Returns the pid of the engine of process `replica`, which is found by the title that vLLM gives it."""
    (engine,) = [pid for pid, title in descendants(replica).items() if "EngineCore" in title]
    return engine


def cpu_seconds(pid: int) -> float:
    """Returns the processor time that `pid` has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def still_there(pids: Iterable[int], *, after_s: float = PATIENCE_S) -> list[int]:
    """Returns those of `pids` that have not ended after `after_s`, or an empty list as soon as all have ended."""
    deadline = time.monotonic() + after_s
    return [pid for pid in pids if not _ends(pid, deadline)]


def _ends(pid: int, deadline: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(1000 * max(0.0, deadline - time.monotonic())))
    finally:
        os.close(descriptor)
