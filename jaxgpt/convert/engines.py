"""Programs that support an exported directory, by rules from their source code."""

from __future__ import annotations

from typing import Literal

from jaxgpt.config import ModelConfig
from jaxgpt.convert.family import Family
from jaxgpt.convert.llamacpp import config as llamacpp
from jaxgpt.convert.llamacpp.architectures import architecture_of
from jaxgpt.convert.llamacpp.tokenizers import is_recognized
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.errors import UserError

Engine = Literal["transformers", "vLLM", "llama.cpp"]


def engines(family: Family, config: ModelConfig, tokenizer: Tokenizer) -> tuple[Engine, ...]:
    """Return the programs that support an exported directory; other programs may reject it, or ignore options.

    The tests open exported directories only with transformers. The rules for vLLM, and for llama.cpp's converter of
    directories, follow their source code.
    """
    if config.n_experts:
        return ("transformers",)
    # vLLM rejects or ignores non-default scales of attention scores, and does not read an untied GPT-2 head.
    is_scaled = config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights
    is_untied_gpt2 = family.name == "gpt2" and not config.tie_embeddings
    if is_scaled or is_untied_gpt2 or config.activation not in family.vllm_activations:
        return ("transformers",)
    if not is_recognized(tokenizer, family.name) or not _llamacpp_computes(family, config):
        return ("transformers", "vLLM")
    return ("transformers", "vLLM", "llama.cpp")


def _llamacpp_computes(family: Family, config: ModelConfig) -> bool:
    """Return whether llama.cpp computes the function of a model."""
    try:
        llamacpp.express(architecture_of(family.name), config)
    except UserError:
        return False
    return True
