"""Measures the cost of the history of calls: the CPU time for the calls and rows of a quickstart step.

`python -m benchmarks.history` keeps the lines of many steps, with messages of the sizes that the quickstart has, and
compares with the median step of `loop.json`.
"""

import json
import tempfile
import time
from pathlib import Path

from google.protobuf.message import Message
from lockstep.reward.v1 import reward_pb2
from lockstep.rollout.v1 import rollout_pb2
from lockstep.trainer.v1 import trainer_pb2
from lockstep.types.v1.types_pb2 import Completion, PolicyStamp

from benchmarks.report import RESULTS, keep
from services.common.rpc.history import keeping, note_row, noting

_NUM_STEPS, _NUM_GROUPS, _NUM_SAMPLES, _NUM_TOKENS = 200, 64, 8, 8
_STAMP = PolicyStamp(version=7, digest="0123456789abcdef" * 2)
_SHA256 = bytes(32)
_METRICS = {f"metric_{number}": number / 7 for number in range(30)}


def _call(method: str, request: Message, *answers: Message) -> None:
    with noting(method, "127.0.0.1:50000", request) as noted:
        for answer in answers:
            noted.got(answer)


def _step(step: int) -> None:
    """Writes the history of one step of the quickstart with two replicas."""
    for group in range(_NUM_GROUPS):
        seeds = list(range(_NUM_SAMPLES))
        prompt = rollout_pb2.Prompt(prompt_id=f"{group}-0a1b2c3d", tokens=list(range(10)), seeds=seeds)
        samples = [
            Completion(tokens=list(range(_NUM_TOKENS)), logprobs=[-0.5] * _NUM_TOKENS, seed=seed) for seed in seeds
        ]
        request = rollout_pb2.GenerateRequest(expected_stamp=_STAMP, prompts=[prompt])
        answer = rollout_pb2.GenerateResponse(
            prompt_id=prompt.prompt_id, completions=samples, stamp=_STAMP, sha256=_SHA256
        )
        _call("rollout.Generate", request, answer)
        score = reward_pb2.ScoreRequest(prompt_id=prompt.prompt_id, run_id="quickstart-0a1b2c3d")
        _call("reward.Score", score, reward_pb2.ScoreResponse(sha256=_SHA256))
    header = trainer_pb2.TrainHeader(expected_stamp=_STAMP, batch_id=f"quickstart-0a1b2c3d/{step}")
    _call("trainer.Train", trainer_pb2.TrainRequest(header=header), trainer_pb2.TrainResponse(metrics=_METRICS))
    _call("trainer.SendWeights", trainer_pb2.SendWeightsRequest(), trainer_pb2.SendWeightsResponse(stamp=_STAMP))
    for _ in range(2):
        received = rollout_pb2.ReceiveWeightsResponse(digest=_STAMP.digest)
        _call("rollout.ReceiveWeights", rollout_pb2.ReceiveWeightsRequest(epoch=3), received)
        _call("rollout.CommitWeights", rollout_pb2.CommitWeightsRequest(stamp=_STAMP))
    for kind in ("selected", "collected", "published", "finished"):
        note_row(step, kind, step)


def _seconds(directory: Path | None) -> list[float]:
    """Returns the CPU time of each step, of all threads; without a directory no history is kept."""
    found = []
    for step in range(_NUM_STEPS):
        begin = time.process_time()
        if directory is None:
            _step(step)
        else:
            with keeping(directory / str(step), "quickstart-0a1b2c3d", 0):
                _step(step)
        found.append(time.process_time() - begin)
    return found


def main() -> None:
    """Measures, and saves the result."""
    step_s = json.loads((RESULTS / "loop.json").read_text())["medians"]["step [s]"]
    with tempfile.TemporaryDirectory() as directory:
        kept, without = _seconds(Path(directory)), _seconds(None)
        num_bytes = [sum(path.stat().st_size for path in one.iterdir()) for one in Path(directory).iterdir()]
    cost = [one - other for one, other in zip(sorted(kept), sorted(without), strict=True)]
    samples = {
        "history of a step [s]": cost,
        "history of a step [bytes]": num_bytes,
        "share of a quickstart step": [one / step_s for one in cost],
    }
    keep("history", samples, libraries=("grpcio", "protobuf"), step_s=step_s)


if __name__ == "__main__":
    main()
