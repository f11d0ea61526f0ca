from collections.abc import Sequence

from sympy import Basic, MatrixBase

class LatexExtractionConfig:
    def __init__(self, *, boxed_match_priority: int = ...) -> None: ...

class ExprExtractionConfig: ...

def parse(
    pred: str,
    extraction_config: Sequence[LatexExtractionConfig | ExprExtractionConfig] = ...,
    *,
    parsing_timeout: int | None = ...,
) -> list[Basic | MatrixBase | str]: ...
def verify(
    gold: Sequence[Basic | MatrixBase | str] | Basic | MatrixBase | str,
    target: Sequence[Basic | MatrixBase | str] | Basic | MatrixBase | str,
    *,
    timeout_seconds: int | None = ...,
    raise_on_error: bool = ...,
) -> bool: ...
