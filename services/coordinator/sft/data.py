"""Loads the tokenized rows of an SFT run. A step's batch depends only on (dataset, seed, step)."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from services.common.batches.batch import SAMPLE_SCHEMA
from services.common.config.sft import SftDataConfig
from services.coordinator.data.order import EpochOrder
from services.coordinator.sft.rows import Example, SftFile
from services.coordinator.text.tokenizer import Tokenizer


class SftDataset:
    """Holds the training rows in file order, and the order that assigns them to the steps' batches."""

    def __init__(self, examples: Sequence[Example], order: EpochOrder):
        self.examples, self._order = examples, order
        self.digest = digest_of(examples)
        """128-bit hex digest of all rows, in order: ids, tokens and masks."""

    @classmethod
    def load(cls, config: SftDataConfig, tokenizer: Tokenizer, *, seed: int) -> "SftDataset":
        """Reads, checks and tokenizes `config.train`. Raises like RowFile.train."""
        return cls(*SftFile.train(config, tokenizer, seed))

    def __len__(self) -> int:
        return len(self.examples)

    def num_steps(self, num_epochs: int) -> int:
        """Returns the number of batches after which every row was used at least `num_epochs` times."""
        return -(-num_epochs * len(self) // self._order.prompts_per_step)

    def batch(self, step: int) -> pa.Table:
        """Returns the batch of `step` (SAMPLE_SCHEMA); its rows are distinct. Needs no state to resume.

        Raises:
            ValueError: `step` is negative.
        """
        return to_table([self.examples[index] for index in self._order.indices(step).tolist()], version=step)


def digest_of(examples: Sequence[Example]) -> str:
    """Returns a 128-bit hex digest of rows, in order: ids, tokens and masks."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        digest.update(f"{example.prompt_id} {len(example.prompt_tokens)} {len(example.tokens)}\n".encode())
        for part in (example.prompt_tokens, example.tokens, example.loss_mask):
            digest.update(part.astype(part.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def to_table(examples: Sequence[Example], *, version: int) -> pa.Table:
    """Converts examples to samples, each in a group of its own, for training the policy of `version`.

    The policy did not generate them, so the digest is empty and the log-probabilities are zero.
    """
    rows = [
        {
            "prompt_id": example.prompt_id,
            "group": index,
            "sample": 0,
            "prompt_tokens": example.prompt_tokens,
            "tokens": example.tokens,
            "logprobs": np.zeros(len(example.tokens), np.float32),
            "loss_mask": example.loss_mask,
            "reward": 0.0,
            "components": [],
            "finish_reason": "stop",
            "policy_version": version,
            "policy_digest": "",
            "scorer": "",
            "seed": 0,
        }
        for index, example in enumerate(examples)
    ]
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)
