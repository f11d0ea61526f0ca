"""Gives a running engine the tokenizer that vLLM needs to find stop strings."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast
from vllm.v1.engine.async_llm import AsyncLLM


def set_tokenizer(llm: AsyncLLM, directory: Path) -> None:
    """Loads the tokenizer of `directory`, which later requests with `detokenize` use.

    Reason: vLLM loads a tokenizer only at its start, in several processes, and then also checks every prompt with it.
    A run without stop strings needs none, and whether there are any is known only from the requests. Without a
    tokenizer vLLM ignores stop strings, without an error. Seen with vLLM 0.32.0.

    Raises:
        OSError, ValueError: The directory has no tokenizer, or a damaged one.
    """
    llm.output_processor.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
