"""Makes the quickstart's model: a Qwen3 of 0.6 M parameters that adds and subtracts, and is right about half the time.

It starts from random weights and learns, one character per token, from the homework of a careless pupil: problems of
`services.coordinator.data.prepare.arithmetic` with answers that often forget to carry, and sometimes slip by one in the
last digit. Imitation gets no better than the pupil. Reinforcement learning does: the reward knows which answers are
right.

    python -m deploy.quickstart.make_model deploy/quickstart/model

Here are the start and the homework; the training is a supervised run, `lockstep sft deploy/quickstart/pretrain.yaml`.
About 3 min on two CPU cores. One machine gives the same bytes each time; another kind or number of cores rounds
differently and ends with slightly different weights. A larger one, for a GPU, wants a smaller learning rate:

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
from services.coordinator.data.prepare.arithmetic import Problem, problems

logger = logging.getLogger("make_model")

PRETRAIN = Path(__file__).with_name("pretrain.yaml")
LOCKSTEP = Path(sys.executable).with_name("lockstep")

SEED = 0
VOCAB = ["<pad>", "<eos>", *"0123456789", *"+-*="]
PAD_ID, EOS_ID = 0, 1
IGNORED = -100

FORGETS_CARRY = 0.6
"""Of the problems with a carry or a borrow. Above a half, the wrong answer is the greedy one."""
SLIPS = 0.2
"""Of all problems."""

NUM_SHEETS, PROBLEMS_PER_SHEET = 600, 256
NUM_HELD_OUT = 1024


def pupil_answer(problem: Problem, rng: random.Random) -> str:
    """What the careless pupil writes: the right answer, or one of two typical mistakes, or both."""
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


def write_homework(train: Path, held_out: Path) -> None:
    """Train problems, and test problems, as the pupil hands them in: columns prompt and response."""
    rng = random.Random(SEED)
    sheets = [row for seed in range(NUM_SHEETS) for row in problems("train", PROBLEMS_PER_SHEET, seed)]
    for path, rows in ((train, sheets), (held_out, problems("test", NUM_HELD_OUT, SEED))):
        path.parent.mkdir(parents=True, exist_ok=True)
        homework = [{"prompt": row["prompt"], "response": pupil_answer(row, rng)} for row in rows]
        pq.write_table(pa.Table.from_pylist(homework), path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character. There is no unknown token: text outside the vocabulary is an error, never a guess."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="right", model_max_length=64
    )


def make_start(hidden_size: int, num_layers: int) -> Qwen3ForCausalLM:
    """Random weights. Heads of 32 are the smallest that vLLM's CPU attention takes; all sizes divide by two ranks."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(VOCAB),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=64,
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
def accuracy(model: Qwen3ForCausalLM, rows: list[Problem]) -> tuple[float, float]:
    """(expected accuracy when sampling at temperature 1, accuracy of greedy decoding), both exact for `rows`."""
    texts = [row["prompt"] + row["answer"] + "<eos>" for row in rows]
    tokens_BT = make_tokenizer()(texts, padding=True, return_tensors="pt").input_ids
    # Padding is on the right, where causal attention cannot see it: no attention mask needed.
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]

    positions_T = torch.arange(tokens_BT.shape[1])
    prompt_lens_B1 = torch.tensor([[len(row["prompt"])] for row in rows])
    targets_BT = tokens_BT.masked_fill((positions_T < prompt_lens_B1) | (tokens_BT == PAD_ID), IGNORED)[:, 1:]
    nll_BT = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, ignore_index=IGNORED, reduction="none")
    greedy_B = ((logits_BTV.argmax(-1) == targets_BT) | (targets_BT == IGNORED)).all(-1)
    return nll_BT.sum(-1).neg().exp().mean().item(), greedy_B.float().mean().item()


def main() -> None:
    """Writes start and homework, trains, measures on held-out problems, and writes the Hugging Face folder."""
    parser = argparse.ArgumentParser(description="Make the quickstart's model.")
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("overrides", nargs="*", help="key=value, for the supervised run")
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--num-layers", type=int, default=4)
    arguments = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    run = [str(PRETRAIN), *arguments.overrides]
    config = load(SftConfig, run)
    make_start(arguments.hidden_size, arguments.num_layers).save_pretrained(config.model)
    make_tokenizer().save_pretrained(config.model)
    write_homework(config.data.train[0], config.data.eval["held-out"])
    subprocess.run([LOCKSTEP, "sft", *run], check=True)

    model = Qwen3ForCausalLM.from_pretrained(config.run_dir / "model")
    sampled, greedy = accuracy(model, problems("test", NUM_HELD_OUT, SEED))
    logger.info("held-out accuracy: sampled %.3f, greedy %.3f", sampled, greedy)
    # In one file, as the model is small; the run's export is made for shards.
    model.save_pretrained(arguments.folder)
    make_tokenizer().save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
