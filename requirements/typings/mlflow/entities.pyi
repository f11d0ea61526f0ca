class Experiment:
    experiment_id: str

class RunInfo:
    run_id: str

class Run:
    info: RunInfo

class Metric:
    def __init__(self, key: str, value: float, timestamp: int, step: int) -> None: ...

class Param:
    def __init__(self, key: str, value: str) -> None: ...
