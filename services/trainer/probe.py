"""Checks models as the trainer does when it opens them, without their weights, in a process of its own.

`python -m services.trainer.probe model` works as services.common.probe says.
"""

import torch

from services.common.probe import Answers, Requests, answer_with


async def model(requests: Requests) -> Answers:
    """Refuses what the trainer would. A request has `model`, a directory; `strategy`; and `dtype`, that of compute."""
    async for request in requests:
        if request["strategy"] == "megatron":
            from services.trainer.megatron.settings import model_architecture, read_config

            model_architecture(read_config(request["model"]))
        else:
            from services.trainer.fsdp.loading import make_empty

            dtype = getattr(torch, request["dtype"])
            make_empty(request["model"], compute_dtype=dtype, weight_dtype=dtype)
        yield {}


if __name__ == "__main__":
    answer_with({"model": model})
