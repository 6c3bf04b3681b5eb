"""Read the options of an imported config.json, and reject unknown and unsupported options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxgpt.errors import UserError, short_repr

# Options that do not change the logits of a trained model. Options that begin with an underscore do not change them either.
# Names, library versions, outputs, and settings of training:
OF_LIBRARIES = """
    architectures attn_implementation auto_map custom_pipelines dtype finetuning_task gradient_checkpointing id2label
    initializer_range is_decoder is_llama_config label2id model_max_length model_type neftune_noise_alpha
    num_labels output_attentions output_hidden_states output_past output_scores pretraining_tp problem_type return_dict
    return_dict_in_generate task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype
    torchscript transformers.js_config transformers_version trust_remote_code unsloth_fixed unsloth_version use_bfloat16
    use_cache
"""
# Ids of special tokens:
OF_TOKENS = """
    bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id forced_eos_token_id pad_token_id sep_token_id
    unk_token_id
"""
# Settings of generation:
OF_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences prefix remove_invalid_values repetition_penalty suppress_tokens
    temperature top_k top_p typical_p
"""
# Settings of caches, classifiers and other models, and the precision of attention scores (here always float32):
OF_OTHERS = """
    apply_query_key_layer_scaling attention_probs_dropout_prob cache_implementation classifier_dropout hidden_dropout_prob
    max_sequence_length n_ctx n_special predict_special_tokens reorder_and_upcast_attn summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
"""
HARMLESS = frozenset(f"{OF_LIBRARIES} {OF_TOKENS} {OF_GENERATION} {OF_OTHERS}".split())

# Map from options that may change the logits to the only value that leaves the logits unchanged.
NEUTRAL: dict[str, Any] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "quantization_config": None,
    "rope_interleaved": False,
}

# Map from options of some families to the value that switches them off. Converted models of other families also contain them.
SWITCHED_OFF: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
}

# Map from the names of activations in other systems to their names in `ModelConfig`.
ACTIVATIONS = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}

KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}


class Options:
    """The options of a config.json. Each option is read once; `done` rejects unread options.

    Attributes:
        handled: names of all options that the caller read, checked or skipped, including those absent from config.json.
    """

    def __init__(self, values: Mapping[str, Any], where: str, accept: Collection[str] = (), advice: str = "") -> None:
        """Drop the harmless options, and check the options in `NEUTRAL`.

        Args:
            values: the content of config.json.
            where: path of config.json, for errors.
            accept: unsupported options to ignore.
            advice: fix to suggest for unsupported options; by default, --accept-option.
        """
        self.where = where
        self._accept = tuple(accept)
        self._advice = advice
        self.handled: set[str] = set()
        self._null = {name for name, value in values.items() if value is None}
        self._left: dict[str, Any] = {}
        for name, value in values.items():
            is_harmless = name in HARMLESS or name.startswith("_")
            if value is not None and not is_harmless:
                self._left[name] = value
        for name, value in NEUTRAL.items():
            self.only(name, value)

    def read(self, name: str, default: Any) -> Any:
        """Read an option; its type must match the type of its default.

        An absent or null option has the default, except that null means 0 for an integer, as in `ModelConfig`. For a
        required option, `default` is its type. Raises `UserError` if a required option is missing, or the type is wrong.
        """
        self.handled.add(name)
        kind = default if isinstance(default, type) else type(default)
        if name in self._null and kind is int:
            return 0
        value = self._left.pop(name, default)
        if value is kind:
            raise UserError(f"{self.where}: {name} is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{self.where}: {name} must be {KINDS[kind]}: {short_repr(value)}")
        return value

    def choice(self, name: str, known: Mapping[str, str], default: str) -> str:
        """Read an option, and map its value with `known`; raise `UserError` for other values."""
        value = self.read(name, default)
        if value not in known:
            raise self.refuse(name, value, f"expected one of {', '.join(known)}")
        return known[value]

    def take(self, name: str, default: Any) -> Any:
        """Read an option of several types; the caller checks the value."""
        self.handled.add(name)
        return self._left.pop(name, default)

    def only(self, name: str, value: Any) -> None:
        """Raise `UserError` if an option does not have the supported value, unless the option is in `accept`.

        If the supported value is None, False is also supported.
        """
        self.handled.add(name)
        actual = self._left.pop(name, value)
        is_off = value is None and actual is False
        if actual == value or is_off or name in self._accept:
            return
        what = f"{self.where}: {name} {short_repr(actual)} is not supported, only {short_repr(value)}"
        raise UserError(f"{what}: {self._fix([name])}")

    def skip(self, *names: str) -> None:
        """Drop options that have no effect in this config."""
        self.handled.update(names)
        for name in names:
            self._left.pop(name, None)

    def inner(self, name: str, values: Mapping[str, Any]) -> Options:
        """Return the options of a nested object, with the same accepted options."""
        return Options(values, f"{self.where}: {name}", self._accept)

    def done(self) -> None:
        """Raise `UserError` if any option was neither read nor accepted, unless it is switched off."""
        if self._left.get("use_sliding_window") is False:
            self.skip("max_window_layers", "sliding_window")
        for name, off in SWITCHED_OFF.items():
            if self._left.get(name) == off:
                self.skip(name)

        unknown = sorted(name for name in self._left if name not in self._accept)
        if not unknown:
            return
        plural = "s" if len(unknown) > 1 else ""
        listed = ", ".join(f"{name} ({short_repr(self._left[name])})" for name in unknown)
        raise UserError(f"{self.where}: unknown option{plural} {listed}: {self._fix(unknown)}")

    def refuse(self, name: str, value: Any, instead: str) -> UserError:
        """Return the error for an unsupported value."""
        return UserError(f"{self.where}: {name} {short_repr(value)} is not supported: {instead}")

    def _fix(self, names: list[str]) -> str:
        """Return the advice in an error about options."""
        if self._advice:
            return self._advice
        return f"to ignore options that do not change the logits, import with --accept-option {' '.join(names)}"
