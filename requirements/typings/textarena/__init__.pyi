from typing import Any

class Wrapper:
    env: Any

class SinglePlayerState: ...

def make(env_id: str, **kwargs: Any) -> Any: ...
