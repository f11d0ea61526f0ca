# Triton is installed with GPU builds of torch only: everything in it is Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
