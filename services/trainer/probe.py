"""Checks models as the trainer does when it opens them, without their weights, in a process of its own.

`python -m services.trainer.probe model` works as services.common.probe says.
"""

import torch

from services.common.config.trainer import TrainerConfig
from services.common.probe import Answers, Requests, answer_with
from services.trainer.backend import compute_dtype


async def model(requests: Requests) -> Answers:
    """Refuses what a trainer on this host would. A request has `model`, a directory, and `config`, a TrainerConfig."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    async for request in requests:
        config = TrainerConfig.model_validate_json(request["config"])
        if config.strategy == "megatron":
            from services.trainer.megatron.settings import model_architecture, read_config

            model_architecture(read_config(request["model"]))
            if config.megatron.use_mbridge:
                from services.trainer.megatron.mbridge import prove_alone

                prove_alone(request["model"], config)
        else:
            from services.trainer.fsdp.loading import make_empty

            dtype = compute_dtype(config, device)
            make_empty(request["model"], compute_dtype=dtype, weight_dtype=dtype)
        yield {}


if __name__ == "__main__":
    answer_with({"model": model})
