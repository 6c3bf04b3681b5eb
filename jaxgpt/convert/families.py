"""The supported transformers families, and the family of a model."""

from __future__ import annotations

from jaxgpt.config import ModelConfig
from jaxgpt.convert import experts, gemma, gpt2, llama, neox
from jaxgpt.convert.canonical import canonical
from jaxgpt.convert.family import Family

OF_LLAMA = (llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3)
WITH_EXPERTS = (experts.MIXTRAL, experts.QWEN3_MOE, experts.OLMOE)
DENSE = (gpt2.FAMILY, *OF_LLAMA, neox.FAMILY, gemma.FAMILY, llama.OLMO2)
FAMILIES = {family.name: family for family in (*DENSE, *WITH_EXPERTS)}


def express_in_family(model: ModelConfig) -> tuple[Family, ModelConfig]:
    """Return the transformers family of a model, and the equivalent config that the family reads.

    Raises `UserError` if a setting has no equivalent in the supported families.
    """
    family = _family_for(canonical(model))
    return family, family.express(model)


def _family_for(model: ModelConfig) -> Family:
    """Return the transformers family closest to a model; `Family.express` checks the settings."""
    if model.positions != "rope":
        return gpt2.FAMILY
    if model.norm == "layernorm":
        return neox.FAMILY
    if model.n_experts:
        return experts.family_for(model)
    if model.norm_position in ("both", "output"):
        return gemma.FAMILY if model.norm_position == "both" else llama.OLMO2
    if model.qk_norm:
        return llama.QWEN3
    if model.window_pattern != "L" or (model.qkv_bias and not model.bias):
        return llama.QWEN2
    return llama.MISTRAL if model.sliding_window else llama.LLAMA
