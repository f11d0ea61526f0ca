"""Rows of a supervised run, tokenised once. A step's batch follows from (dataset, seed, step) alone."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from services.common.batch import SAMPLE_SCHEMA
from services.common.config.sft import SftDataConfig
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.tokenizer import Tokenizer
from services.coordinator.sft.rows import Example, SftFile


class SftDataset:
    """Training rows in the order of their files, cut into the batches of the run's steps."""

    def __init__(self, examples: Sequence[Example], order: EpochOrder):
        self.examples, self._order = examples, order
        digest = hashlib.blake2b(digest_size=16)
        for example in examples:
            digest.update(f"{example.prompt_id} {len(example.prompt_tokens)} {len(example.tokens)}\n".encode())
            for part in (example.prompt_tokens, example.tokens, example.loss_mask):
                digest.update(part.astype(part.dtype.newbyteorder("<")).tobytes())
        self.digest = digest.hexdigest()
        """128-bit hash, as hex, of rows, order, token ids and masks: all that a run sees of this data."""

    @classmethod
    def load(cls, config: SftDataConfig, tokenizer: Tokenizer, *, seed: int) -> "SftDataset":
        """Reads, checks and tokenises `config.train`; raises as RowFile.train."""
        return cls(*SftFile.train(config, tokenizer, seed))

    def __len__(self) -> int:
        return len(self.examples)

    def num_steps(self, num_epochs: int) -> int:
        """Batches after which every row was in at least `num_epochs`."""
        return -(-num_epochs * len(self) // self._order.prompts_per_step)

    def batch(self, step: int) -> pa.Table:
        """The batch of `step` (common.batch.SAMPLE_SCHEMA), rows all different; to resume is to ask for the next step.

        Raises:
            ValueError: `step` is negative.
        """
        return to_table([self.examples[index] for index in self._order.indices(step).tolist()], version=step)


def to_table(examples: Sequence[Example], *, version: int) -> pa.Table:
    """Examples as samples, each a group of its own, to train the policy of `version`: it drew none of them, so that
    there is no digest and the log-probabilities are zero."""
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
