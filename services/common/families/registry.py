"""Lists the model families that are known, by the model_type in a model's config.json."""

from services.common.families import llama, mistral, mixtral, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe
from services.common.families.record import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, mistral, mixtral, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe)
}
