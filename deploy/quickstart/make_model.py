"""Makes the quickstart's model: a Qwen3 of 0.6 M parameters that adds and subtracts, and is right about half the time.

It starts from random weights and learns, one character per token, from the homework of a careless pupil: problems of
`services.coordinator.data.arithmetic` with answers that often forget to carry, and sometimes slip by one in the last
digit. Imitation gets no better than the pupil. Reinforcement learning does, because the reward knows which answers are
right.

    OMP_NUM_THREADS=1 python -m deploy.quickstart.make_model deploy/quickstart/model

About 3 min on one CPU core. One machine gives the same bytes each time; another kind of CPU rounds differently and ends
with slightly different weights. Needs the `trainer` extra.
"""

import argparse
import logging
import random
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from services.coordinator.data.arithmetic import Problem, problems

logger = logging.getLogger("make_model")

SEED = 0
VOCAB = ["<pad>", "<eos>", *"0123456789", *"+-*="]
PAD_ID, EOS_ID = 0, 1
IGNORED = -100

FORGETS_CARRY = 0.57
"""Of the problems with a carry or a borrow. Above a half, the wrong answer is the greedy one."""
SLIPS = 0.2
"""Of all problems."""

BATCH_SIZE = 256
NUM_STEPS = 1000
WARMUP_STEPS = 50
LR = 2e-3
LOG_EVERY_STEPS = 100


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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character. There is no unknown token: text outside the vocabulary is an error, never a guess."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="right", model_max_length=64
    )


def make_model() -> Qwen3ForCausalLM:
    """Random weights. Heads of 32 are the smallest that vLLM's CPU attention takes; all sizes divide by two ranks."""
    config = Qwen3Config(
        vocab_size=len(VOCAB),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
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


def answer_logits(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Problem]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits_BTV` that predict `targets_BT`, which are `IGNORED` outside the answer and its end token."""
    texts = [row["prompt"] + row["answer"] + "<eos>" for row in rows]
    tokens_BT = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    # Padding is on the right, where causal attention cannot see it: no attention mask needed.
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]

    positions_T = torch.arange(tokens_BT.shape[1])
    prompt_lens_B1 = torch.tensor([[len(row["prompt"])] for row in rows])
    targets_BT = tokens_BT.masked_fill((positions_T < prompt_lens_B1) | (tokens_BT == PAD_ID), IGNORED)[:, 1:]
    return logits_BTV, targets_BT


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Problem]) -> tuple[float, float]:
    """(expected accuracy when sampling at temperature 1, accuracy of greedy decoding), both exact for `rows`."""
    logits_BTV, targets_BT = answer_logits(model, tokenizer, rows)
    ignored_BT = targets_BT == IGNORED
    nll_BT = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, ignore_index=IGNORED, reduction="none")
    greedy_B = ((logits_BTV.argmax(-1) == targets_BT) | ignored_BT).all(-1)
    return nll_BT.sum(-1).neg().exp().mean().item(), greedy_B.float().mean().item()


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised training on the pupil's answers to fresh train problems."""
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 2 * (1 - step / NUM_STEPS), 1.0)
    )
    for step in range(NUM_STEPS):
        rows = problems("train", BATCH_SIZE, seed=step)
        homework: list[Problem] = [{**row, "answer": pupil_answer(row, rng)} for row in rows]
        logits_BTV, targets_BT = answer_logits(model, tokenizer, homework)
        loss = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % LOG_EVERY_STEPS == 0:
            sampled, greedy = accuracy(model, tokenizer, rows)
            logger.info("step %d: loss %.3f, right: sampled %.3f, greedy %.3f", step + 1, loss.item(), sampled, greedy)


def main() -> None:
    """Trains, measures on held-out problems, and writes the Hugging Face folder."""
    parser = argparse.ArgumentParser(description="Make the quickstart's model.")
    parser.add_argument("folder", type=Path, help="where to write it")
    folder: Path = parser.parse_args().folder
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(SEED)
    torch.set_num_threads(1)

    tokenizer, model = make_tokenizer(), make_model()
    logger.info("%d parameters", model.num_parameters())
    train(model, tokenizer)
    sampled, greedy = accuracy(model, tokenizer, problems("test", 1024, SEED))
    logger.info("held-out accuracy: sampled %.3f, greedy %.3f", sampled, greedy)
    model.save_pretrained(folder)
    # Not the tokenizer used above: it would be saved with the padding of its last batch.
    make_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main()
