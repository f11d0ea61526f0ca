"""Reads the config of a model directory with transformers."""

from transformers import AutoConfig, PretrainedConfig

from services.common.errors import InvalidInput
from services.common.families.architecture import read_content
from services.common.families.supported import require_counts


def load_config(model_path: str) -> PretrainedConfig:
    """Returns transformers' config of a model.

    Raises:
        InvalidInput: transformers does not know the architecture, or a value in config.json is invalid.
    """
    require_counts(read_content(model_path), f"{model_path}/config.json")
    try:
        return AutoConfig.from_pretrained(model_path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its classes of configs check values by many kinds of errors, and read nothing else
        raise InvalidInput(f"model: {model_path}/config.json: {error!r}", field="model") from error
