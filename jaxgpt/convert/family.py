"""A family of models: its names, and the functions that convert its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxgpt.config import ModelConfig
from jaxgpt.convert.options import Options
from jaxgpt.convert.weights import Format


class Family(NamedTuple):
    """The names and functions for reading and writing a transformers family. docs/families.md shows how to add a family.

    Attributes:
        name: `model_type` in config.json.
        architectures: its classes; the first has a head. A file may contain the model without its head, if the head is tied.
        form: the names of its tensors.
        config_from_hf: converts the options of a config.json. It reads each option that can change the logits.
        adapt: returns a config of the same function that the family can express, or raises a `UserError` that names a setting.
        to_hf: converts a config that `adapt` returned to the options that differ between families.
        served: activations that vLLM and llama.cpp compute in this family, as read in their sources.
        form_of: returns the names of the tensors for the content of a config.json, if they depend on it.
    """

    name: str
    architectures: tuple[str, ...]
    form: Format
    config_from_hf: Callable[[Options], ModelConfig]
    adapt: Callable[[ModelConfig], ModelConfig]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    served: tuple[str, ...] = ("silu",)
    form_of: Callable[[Mapping[str, Any]], Format] | None = None

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Convert a config that `adapt` returned to a config.json."""
        return {
            "architectures": [self.architectures[0]],
            "model_type": self.name,
            "vocab_size": config.vocab_size,
            "initializer_range": config.init_std,
            "tie_word_embeddings": config.tie_embeddings,
            "use_cache": True,
        } | self.to_hf(config)

    def engines(self, config: ModelConfig) -> tuple[str, ...]:
        """Return the programs that compute an exported model. vLLM and llama.cpp ignore some options of a config.json."""
        untied = self.name == "gpt2" and not config.tie_embeddings  # vLLM reads no head
        if config.activation not in self.served or untied:
            return ("transformers",)
        windows = any(0 < window < config.block_size for window in config.windows)
        llama_cpp = ("llama.cpp",) if not windows or self.name == "gemma3_text" else ()
        return ("transformers", "vLLM", *llama_cpp)
