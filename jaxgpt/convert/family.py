"""A family of models: the names of its tensors and options, as tables for both import and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.convert.options import ACTIVATIONS, Options
from jaxgpt.convert.rope import is_linear, linear_scaling
from jaxgpt.convert.tensors import Format
from jaxgpt.errors import UserError, short_repr

OF_LLAMA3 = ("rope_low_freq_factor", "rope_high_freq_factor")
OF_YARN = ("rope_beta_slow", "rope_beta_fast", "rope_attention_factor")
SCALING = ("rope_scaling", *OF_LLAMA3, *OF_YARN, "rope_original_context")
# Settings without effect in a model without experts.
OF_EXPERTS = ("experts_per_token", "shared_experts", "router", "router_normalize", "router_scale", "router_bias")
TRAINING = ("dropout", "init", "init_std")  # settings that do not affect the output of a trained model


class Family(NamedTuple):
    """A family of transformers models, for import and export. docs/families.md shows how to add a family.

    Attributes:
        name: `model_type` in config.json.
        architectures: class names in config.json; exports use the first class, which has a head. An imported model may
            lack the head if it is tied.
        form: names and layout of the tensors.
        options: map from an option of config.json to its setting and the default in transformers' config class.
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


def canonical(config: ModelConfig) -> ModelConfig:
    """Convert a config to its canonical form: explicit sizes, short epsilon, and unique settings of windows, RoPE and biases.

    Settings that have no effect get their defaults, because a family may lack them.
    """
    unused: dict[str, Any] = {}
    if not config.qk_norm:
        unused |= defaults("qk_norm_per_head")
    if not config.n_experts:
        unused |= defaults(*OF_EXPERTS)
    return replace(
        config,
        norm_eps=float(str(np.float32(config.norm_eps))),  # 1e-05, not 9.999999747378752e-06, as GGUF files store it
        n_kv_head=config.kv_heads,
        head_dim=config.head_width,
        n_inner=config.mlp_width,
        qkv_bias=config.qkv_bias and not config.bias,
        **unused,
        **_canonical_rope(config),
        **_canonical_windows(config),
    )


def _canonical_rope(config: ModelConfig) -> dict[str, Any]:
    """Return defaults for the RoPE settings that have no effect, and express linear scaling as Llama 3 scaling."""
    if config.positions != "rope":
        return defaults("rope_theta", "rope_fraction", "rope_factor", *SCALING)
    if config.rope_factor == 1.0:
        return defaults(*SCALING)
    if is_linear(config):
        return defaults(*OF_YARN) | linear_scaling(config.block_size)
    if config.rope_scaling == "yarn":
        return defaults(*OF_LLAMA3)
    return defaults(*OF_YARN)


def _canonical_windows(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of sliding windows: the shortest pattern, and `rope_local_theta` 0 if all layers have one RoPE."""
    pattern = period("".join("L" if window else "G" for window in config.windows))
    if "L" not in pattern:
        return {"sliding_window": 0, "window_pattern": "L", "rope_local_theta": 0.0}
    has_one_rope = config.rope_factor == 1.0 and config.rope_local_theta == config.rope_theta
    return {
        "sliding_window": config.sliding_window,
        "window_pattern": pattern,
        "rope_local_theta": 0.0 if has_one_rope else config.rope_local_theta,
    }


def defaults(*names: str) -> dict[str, Any]:
    """Return the defaults of settings of `ModelConfig`."""
    return {name: getattr(ModelConfig, name) for name in names}


def period(pattern: str) -> str:
    """Return the shortest prefix of a pattern that, when repeated and truncated, equals the pattern."""
    for n in range(1, len(pattern)):
        if pattern[n:] == pattern[:-n]:
            return pattern[:n]
    return pattern
