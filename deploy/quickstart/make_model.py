"""Makes the quickstart's model: a Qwen3 with 0.6 M parameters that adds and subtracts, and is right half of the time.

The model starts from random weights, with one token per character, and is trained on flawed demonstrations: problems of
`services.coordinator.data.prepare` with answers that often forget to carry, and are sometimes off by one in
the last digit. Imitating them cannot make the model better than they are. Reinforcement learning can, because the
reward is computed from the right answers.

    python -m deploy.quickstart.make_model deploy/quickstart/model

This script makes the random start and the demonstrations. The training is a supervised run, `lockstep sft
deploy/quickstart/pretrain.yaml`, and takes about 3 min on two CPU cores. The same machine always produces the same
bytes; another type or number of cores rounds differently and gives slightly different weights. A larger model, for a
GPU, needs a smaller learning rate:

    python -m deploy.quickstart.make_model data/larger --hidden-size 512 --num-layers 8 trainer.optim.lr=5e-4

Needs the `trainer` extra.
"""

import argparse
import logging
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from services.common.config.load import load
from services.common.config.sft import SftConfig
from services.common.json_values import JsonObject
from services.coordinator.data.prepare import problems

logger = logging.getLogger("make_model")

PRETRAIN = Path(__file__).with_name("pretrain.yaml")
LOCKSTEP = Path(sys.executable).with_name("lockstep")

SEED = 0
VOCAB = ["<pad>", "<eos>", *"0123456789", *"+-*="]
PAD_ID, EOS_ID = 0, 1
IGNORED = -100

FORGETS_CARRY = 0.6
"""Share of wrong answers to problems with a carry or a borrow. Above 0.5, greedy decoding gives the wrong answer."""
SLIPS = 0.2
"""Share of all problems whose answer is off by one in the last digit."""

NUM_SHEETS, PROBLEMS_PER_SHEET = 600, 256
NUM_HELD_OUT = 1024


def flawed_answer(problem: JsonObject, rng: random.Random) -> str:
    """Returns an answer to demonstrate: the right one, or one with one or both of two typical mistakes."""
    answer = int(problem["answer"])
    if problem["level"] > 0 and rng.random() < FORGETS_CARRY:
        a, op, b = re.fullmatch(r"(\d+)([+-])(\d+)=", problem["prompt"]).groups()
        sign = 1 if op == "+" else -1
        tens = (int(a) // 10 + sign * (int(b) // 10)) % 10
        answer = 10 * tens + (int(a) + sign * int(b)) % 10
    if rng.random() < SLIPS:
        units = answer % 10
        answer += (units + rng.choice((-1, 1))) % 10 - units
    return str(answer)


def write_demonstrations(train: Path, held_out: Path) -> None:
    """Writes flawed answers to train and to test problems as Parquet, with columns prompt and response."""
    rng = random.Random(SEED)
    sheets = [row for seed in range(NUM_SHEETS) for row in problems("train", PROBLEMS_PER_SHEET, seed)]
    for path, rows in ((train, sheets), (held_out, problems("test", NUM_HELD_OUT, SEED))):
        path.parent.mkdir(parents=True, exist_ok=True)
        answered = [{"prompt": row["prompt"], "response": flawed_answer(row, rng)} for row in rows]
        pq.write_table(pa.Table.from_pylist(answered), path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character. It has no unknown token: other text is an error."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="right", model_max_length=64
    )


def make_start(
    hidden_size: int, num_layers: int, vocab_size: int = len(VOCAB), max_tokens: int = 64
) -> Qwen3ForCausalLM:
    """Returns a model with random weights, for sequences of up to `max_tokens` tokens.

    Its heads have 32 dimensions, the minimum of vLLM's CPU attention, and all sizes are divisible by two ranks.
    """
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    return model


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, rows: list[JsonObject]) -> tuple[float, float]:
    """Returns the expected accuracy of sampling at temperature 1 and that of greedy decoding, both exact for `rows`."""
    texts = [row["prompt"] + row["answer"] + "<eos>" for row in rows]
    tokens_BT = make_tokenizer()(texts, padding=True, return_tensors="pt").input_ids
    # Padding is on the right, where causal attention cannot see it, so no attention mask is needed.
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]

    positions_T = torch.arange(tokens_BT.shape[1])
    prompt_lens_B1 = torch.tensor([[len(row["prompt"])] for row in rows])
    targets_BT = tokens_BT.masked_fill((positions_T < prompt_lens_B1) | (tokens_BT == PAD_ID), IGNORED)[:, 1:]
    nll_BT = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, ignore_index=IGNORED, reduction="none")
    greedy_B = ((logits_BTV.argmax(-1) == targets_BT) | (targets_BT == IGNORED)).all(-1)
    return nll_BT.sum(-1).neg().exp().mean().item(), greedy_B.float().mean().item()


def main() -> None:
    """Writes the random start and the demonstrations, trains, measures held-out accuracy, and writes the model."""
    parser = argparse.ArgumentParser(description="Make the quickstart's model.")
    parser.add_argument("folder", type=Path, help="directory to write the model to")
    parser.add_argument("overrides", nargs="*", help="key=value overrides of the supervised run")
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--num-layers", type=int, default=4)
    arguments = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    run = [str(PRETRAIN), *arguments.overrides]
    config = load(SftConfig, run)
    make_start(arguments.hidden_size, arguments.num_layers).save_pretrained(config.model)
    make_tokenizer().save_pretrained(config.model)
    write_demonstrations(config.data.train[0], config.data.eval["held-out"])
    subprocess.run([LOCKSTEP, "sft", *run], check=True)

    model = Qwen3ForCausalLM.from_pretrained(config.run_dir / "model")
    sampled, greedy = accuracy(model, problems("test", NUM_HELD_OUT, SEED))
    logger.info("held-out accuracy: sampled %.3f, greedy %.3f", sampled, greedy)
    # Save the small model as one file; the run's export is sharded.
    model.save_pretrained(arguments.folder)
    make_tokenizer().save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
