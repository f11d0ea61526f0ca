"""Creates a small model directory with a real byte-level BPE tokenizer, trained here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.coordinator.text.tokenizer import Tokenizer

CHATML = """{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
{%- endif -%}
{% for message in messages -%}
    {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

# How Qwen2 splits text. If config.json says qwen2, transformers uses this instead of what tokenizer.json says.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_CORPUS = [
    "Natalia sold clips to 48 of her friends in April, and then half as many clips in May.",
    "How many clips did she sell altogether? What is 12 + 30 - 7 = ?",
    "system user assistant You are helpful. Reason step by step, then give the result.",
]


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    # Like Llama 3: prepends BOS to text by default.
    bos = SPECIAL_TOKENS[0]
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    return backend


@pytest.fixture
def make_model(tmp_path: Path, backend: tokenizers.Tokenizer) -> Callable[..., Path]:
    """Writes a model directory. Arguments replace the content of files; a file given as None is not written."""

    def make(chat_template: str | None = CHATML, **files: Any) -> Path:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        contents: dict[str, Any] = {
            "tokenizer": json.loads(backend.to_str()),
            "tokenizer_config": {
                "tokenizer_class": "Qwen2Tokenizer",
                "bos_token": "<|endoftext|>",
                "eos_token": {"content": "<|im_end|>", "special": True, "__type": "AddedToken"},
                "pad_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False,
            },
            "generation_config": {"eos_token_id": [2, 0]},
            "config": {"model_type": "qwen2", "eos_token_id": 2},
        } | files
        for name, content in contents.items():
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (directory / f"{name}.json").write_text(text, encoding="utf-8")
        if chat_template is not None:
            (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        return directory

    return make


@pytest.fixture
def tokenizer(make_model: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.load(make_model())


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "train.parquet", /, schema: pa.Schema | None = None, **columns: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns, schema=schema), path)
        return path

    return write
