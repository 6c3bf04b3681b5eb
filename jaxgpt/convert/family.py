"""A family of models: the names of its tensors and options, as tables for both import and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from jaxgpt.config import ModelConfig
from jaxgpt.convert.canonical import canonical
from jaxgpt.convert.options import ACTIVATIONS, Options
from jaxgpt.convert.tensors import Format
from jaxgpt.errors import UserError, short_repr

TRAINING = ("dropout", "init", "init_std")  # settings that do not affect the output of a trained model


class Family(NamedTuple):
    """A family of transformers models, for import and export. docs/families.md shows how to add a family.

    Attributes:
        name: `model_type` in config.json.
        architectures: class names in config.json; exports use the first class, which has a head. An imported model may
            lack the head if it is tied.
        form: names and layout of the tensors.
        options: map from an option of config.json to its setting and the default in transformers' config class; instead of a
            default, a required option has its type.
        settings: settings common to all models of the family.
        only: map from options with a single supported value to this value.
        fills: settings that an export can add to any model: they add biases of 0 or gains of 1, or have no effect on logits.
        read: function that converts the other options to settings, given the config from `options` and `settings`.
        write: the inverse of `read`.
        vllm_activations: activations that vLLM supports in this family, according to its source code.
        form_of: function from the content of config.json and the model config to the form of an import; None: `form`.
    """

    name: str
    architectures: tuple[str, ...]
    form: Format
    options: Mapping[str, tuple[str, Any]]
    settings: dict[str, Any]
    only: dict[str, Any]
    fills: dict[str, Any]
    read: Callable[[Options, ModelConfig], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    vllm_activations: tuple[str, ...] = ("silu",)
    form_of: Callable[[Mapping[str, Any], ModelConfig], Format] | None = None

    def config_from_hf(self, options: Options) -> ModelConfig:
        """Convert the options of a config.json to a model config."""
        for name, value in self.only.items():
            options.only(name, value)
        values = dict(self.settings)
        for name, (setting, default) in self.options.items():
            if setting == "activation":
                values[setting] = options.choice(name, ACTIVATIONS, default)
            else:
                values[setting] = options.read(name, default)
        config = ModelConfig(**values)
        return replace(config, **self.read(options, config))

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Convert a model config to the content of a config.json, without settings that the family lacks."""
        config = canonical(config)
        about = {
            "architectures": [self.architectures[0]],
            "model_type": self.name,
            "use_cache": True,
            "initializer_range": config.init_std,
        }
        values = {name: getattr(config, setting) for name, (setting, _) in self.options.items()}
        return about | values | self.write(config)

    def express(self, config: ModelConfig) -> ModelConfig:
        """Return the equivalent config, as an import of the exported model reads it.

        Raises `UserError` with the first setting that the family cannot express.
        """
        # A gated MLP expresses a plain MLP with ReLU^2: relu(u)^2 = relu(u) u.
        is_plain_relu2 = config.mlp == "plain" and config.activation == "relu2" and not config.bias
        if is_plain_relu2 and self.settings.get("mlp") == "gated":
            config = replace(config, mlp="gated", activation="relu", n_inner=config.mlp_width)

        # Read back what an export would write.
        wanted = canonical(replace(config, **self.fills))
        found = self.config_from_hf(Options(self.config_to_hf(wanted), "config.json"))
        for name, value in asdict(canonical(found)).items():
            actual = getattr(wanted, name)
            if name not in TRAINING and value != actual:
                raise UserError(
                    f"model.{name} {short_repr(actual)} has no {self.name} equivalent: it must be {short_repr(value)}"
                )
        return found
