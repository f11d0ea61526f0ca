"""Scores with a Hugging Face sequence-classification model. Runs only in a worker process, because it imports torch."""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from services.common.families.supported import check_bounds
from services.reward.errors import FailureReason, ScoringError

Message = dict[str, str]


class Limits(TypedDict):
    """Limits the samples of one forward and the tokens of one sample."""

    batch_size: int
    max_tokens: int | None


def load(
    *, path: str, label: int | None, template: str, device: str, dtype: str, **limits: Unpack[Limits]
) -> tuple[Callable[..., list[float | ScoringError]], str]:
    """Loads the model at `path`. Returns its scorer, and the hash of its files and settings."""
    if not Path(path).is_dir():
        raise ValueError(f"path {path!r} is not a directory")
    check_bounds(path)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    local = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(path, **local)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=dtype, use_safetensors=True, output_loading_info=True, **local
    )
    # transformers initializes missing weights at random, such as the head of a plain language model.
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"{path} is not a sequence-classification model: it lacks weights {', '.join(missing[:5])}")
    if template == "chat" and tokenizer.chat_template is None:
        raise ValueError("template is chat, but the tokenizer has no chat template; use plain")
    is_chat = tokenizer.chat_template is not None and template != "plain"
    num_labels = model.config.num_labels
    if label is None and num_labels != 1:
        raise ValueError(f"the model has {num_labels} labels: set label to the index of the one that is the score")
    if label is not None and label >= num_labels:
        raise ValueError(f"label {label}: the model has {num_labels} labels")
    label = label or 0
    scorer = RewardModel(model.to(device).eval(), tokenizer, label=label, is_chat=is_chat, **limits)
    return scorer, _digest(Path(path), f"{label} {is_chat} {dtype} {limits['max_tokens']}")


class RewardModel:
    """Returns the logits of `model` at `label`, computed for at most `batch_size` samples at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        label: int,
        is_chat: bool,
        **limits: Unpack[Limits],
    ):
        self._model, self._tokenizer, self._label, self._is_chat = model, tokenizer, label, is_chat
        self._pad_token_id = model.config.get_text_config().pad_token_id
        # Without a pad token the model cannot find the end of a padded sample.
        self._batch_size = 1 if self._pad_token_id is None else limits["batch_size"]
        self._max_tokens = limits["max_tokens"] or _num_positions(model)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(re.escape(token) for token in special)) if special else None

    def __call__(
        self, *, prompt: Sequence[str], completion: Sequence[str], messages: Sequence[Sequence[Message]], **_: object
    ) -> list[float | ScoringError]:
        """Returns one logit per sample, or an error for a sample of more than `max_tokens` tokens."""
        tokens = [self._encode(*sample) for sample in zip(prompt, completion, messages, strict=True)]
        scores = list[float | ScoringError]()
        for ids in tokens:
            detail = f"{len(ids)} tokens are more than max_tokens {self._max_tokens}"
            scores.append(ScoringError(FailureReason.ERROR, detail))
        fitting = [index for index, ids in enumerate(tokens) if len(ids) <= self._max_tokens]
        for start in range(0, len(fitting), self._batch_size):
            indices = fitting[start : start + self._batch_size]
            for index, score in zip(indices, self._forward([tokens[i] for i in indices]), strict=True):
                scores[index] = score
        return scores

    def _encode(self, prompt: str, completion: str, messages: Sequence[Message]) -> list[int]:
        # A completion may contain the text of a special token, such as the end of a turn. Break it up, so that it is
        # tokenized as text.
        if self._special:
            completion = self._special.sub(lambda token: f"{token[0][0]} {token[0][1:]}", completion)
        if self._is_chat:
            # The prompt itself is the policy's rendering, whose marks the reward model would read within a message.
            asked = messages or [{"role": "user", "content": prompt}]
            answer = {"role": "assistant", "content": completion}
            text = self._tokenizer.apply_chat_template([*asked, answer], tokenize=False)
            assert isinstance(text, str), "tokenize=False gives text"
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        text = prompt + completion
        bos = self._tokenizer.bos_token
        has_bos = isinstance(bos, str) and bos != "" and text.startswith(bos)
        return self._tokenizer(text, add_special_tokens=not has_bos)["input_ids"]

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[list[int]]) -> list[float]:
        length = max(map(len, tokens))
        pad = self._pad_token_id or 0
        ids_BT = torch.tensor([ids + [pad] * (length - len(ids)) for ids in tokens])
        mask_BT = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in tokens])
        device = self._model.device
        try:
            logits_BL = self._model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device)).logits
            return logits_BL[:, self._label].float().tolist()
        except torch.AcceleratorError as error:  # after it, no call of this process on its GPU works
            raise SystemExit(str(error).partition("\n")[0]) from error


def _num_positions(model: PreTrainedModel) -> float:
    """Returns how many tokens the model has positions for; infinity if its config does not say."""
    number = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    tables = (module for name, module in model.named_modules() if name.endswith(".position_embeddings"))
    # RoBERTa and its kind give the first token the position behind that of padding.
    paddings = (getattr(table, "padding_idx", None) for table in tables)
    return number - next((padding + 1 for padding in paddings if padding is not None), 0)


def _digest(path: Path, settings: str) -> str:
    digest = hashlib.sha256(settings.encode())
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:12]
