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
        config_to_hf: converts a config that `adapt` returned to a config.json.
        form_of: returns the names of the tensors for the content of a config.json, if they depend on it.
    """

    name: str
    architectures: tuple[str, ...]
    form: Format
    config_from_hf: Callable[[Options], ModelConfig]
    adapt: Callable[[ModelConfig], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    form_of: Callable[[Mapping[str, Any]], Format] | None = None
