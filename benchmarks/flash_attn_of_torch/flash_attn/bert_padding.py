"""What transformers imports from here and calls only for padded batches, which verl does not make."""

from typing import Any


def pad_input(*_: Any, **__: Any) -> Any:
    """Raises: no batch is padded."""
    raise NotImplementedError("sequences are packed")


def unpad_input(*_: Any, **__: Any) -> Any:
    """Raises: no batch is padded."""
    raise NotImplementedError("sequences are packed")
