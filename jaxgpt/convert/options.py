"""Read the config.json of another system completely: each option is used, known to be harmless, or rejected."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn, TypeVar

from jaxgpt.errors import UserError, short_repr

T = TypeVar("T")

# Options that do not change the logits of a trained model: names, ids of special tokens, settings of generation and of the
# program that wrote the file. Neither do those whose name begins with an underscore, which transformers adds itself.
HARMLESS = frozenset(
    """
    architectures attn_implementation auto_map dtype finetuning_task gradient_checkpointing id2label initializer_range
    is_decoder is_llama_config label2id model_max_length model_type neftune_noise_alpha
    num_labels output_attentions output_hidden_states output_past output_scores pretraining_tp problem_type return_dict
    return_dict_in_generate task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype
    torchscript transformers.js_config transformers_version trust_remote_code unsloth_fixed unsloth_version use_bfloat16
    use_cache

    bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id forced_eos_token_id pad_token_id sep_token_id
    unk_token_id

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences prefix remove_invalid_values repetition_penalty suppress_tokens
    temperature top_k top_p typical_p
    """.split()
)

# Options that change the logits, except with this value.
NEUTRAL: dict[str, Any] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "pruned_heads": {},
}
# The same, but the user may accept other values: weights that are no plain numbers are rejected in any case.
DOUBTFUL: dict[str, Any] = {"quantization_config": None, "rope_interleaved": False}


class Options:
    """The options of a config.json. Each option is read once; `done` rejects unread options."""

    def __init__(
        self, values: Mapping[str, Any], where: str, accept: Collection[str] = (), outer: Options | None = None
    ) -> None:
        """Drop the harmless options, and check the neutral ones.

        Args:
            values: the content of config.json.
            where: its path, for errors.
            accept: unsupported options to ignore.
            outer: the options of the file, if `values` is an object in it (see `inner`).
        """
        self.where, self._outer = where, outer
        self._accept: tuple[str, ...] = outer._accept if outer else tuple(accept)
        self._accepted: set[str] = outer._accepted if outer else set()
        self._null = {k for k, v in values.items() if v is None}
        used = {k: v for k, v in values.items() if v is not None}
        self._left = {k: v for k, v in used.items() if k not in HARMLESS and not k.startswith("_")}
        for name, value in NEUTRAL.items():
            self.only(name, value)
        for name, value in DOUBTFUL.items():
            self.expect(name, value)

    def integer(self, name: str, default: int | None = None) -> int:
        """Read an integer; null means the default."""
        value = self._required(name, default)
        return value if type(value) is int else self._wrong(name, value, "an integer")

    def number(self, name: str, default: float | None = None) -> float:
        """Read a number; null means the default."""
        value = self._required(name, default)
        return float(value) if type(value) in (int, float) else self._wrong(name, value, "a number")

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false; null means the default."""
        value = self._required(name, default)
        return value if isinstance(value, bool) else self._wrong(name, value, "true or false")

    def choice(self, name: str, known: Mapping[str, T], default: str) -> T:
        """Read a name, and return its value in `known`; null means the default."""
        value = self._required(name, default)
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{self.where}: {name} {short_repr(value)} is not supported: one of {', '.join(known)}")
        return known[value]

    def object(self, name: str) -> dict[str, Any]:
        """Read an object; {} if it is absent or null."""
        value = self.take(name)
        if not isinstance(value or {}, dict):
            raise self.refuse(name, value, "it must be an object")
        return value or {}

    def take(self, name: str, default: Any = None) -> Any:
        """Read an option of any type; the default if it is absent, None if it is null."""
        return self._left.pop(name, None if name in self._null else default)

    def is_null(self, name: str) -> bool:
        """Return whether the option is null, which in some families differs from the default."""
        return name in self._null

    def only(self, name: str, value: Any) -> None:
        """Require this option to have the one supported value.

        Raises:
            UserError: if the option has a different value.
        """
        actual = self._left.pop(name, value)
        if not _same(actual, value):
            raise UserError(f"{self.where}: {name} {short_repr(actual)} is not supported, only {short_repr(value)}")

    def expect(self, name: str, value: Any) -> None:
        """Require this option to have the one supported value, unless the user accepts others.

        Raises:
            UserError: if the option has a different value that is not accepted.
        """
        if name in self._accept and not _same(self._left.get(name, value), value):
            self._accepted.add(name)
            del self._left[name]
        try:
            self.only(name, value)
        except UserError as e:
            raise UserError(f"{e}: if it does not change the logits, import with --accept-option {name}") from None

    def skip(self, *names: str) -> None:
        """Drop options that do not change the logits of this family."""
        for name in names:
            self._left.pop(name, None)

    def inner(self, name: str, values: Mapping[str, Any]) -> Options:
        """Return the options of an object in the file, with the same accepted options."""
        return Options(values, f"{self.where}: {name}", outer=self)

    def done(self, instead: str = "") -> None:
        """Check that every option was read or accepted.

        Args:
            instead: advice on unknown options that cannot be accepted.

        Raises:
            UserError: if options are unknown, or an accepted option is absent or supported.
        """
        if unknown := sorted(name for name in self._left if name not in self._accept):
            listed = ", ".join(f"{name} ({short_repr(self._left[name])})" for name in unknown)
            plural = len(unknown) > 1
            instead = instead or (
                f"if the logits do not depend on {'them' if plural else 'it'}, import with --accept-option {' '.join(unknown)}"
            )
            raise UserError(f"{self.where}: unknown option{'s' * plural} {listed}: {instead}")
        self._accepted.update(self._left)
        needless = [name for name in self._accept if name not in self._accepted]
        if needless and not self._outer:
            raise UserError(f"--accept-option {needless[0]}: {self.where} has no such option to accept")

    def refuse(self, name: str, value: Any, instead: str) -> UserError:
        """Return the error for an unsupported value."""
        return UserError(f"{self.where}: {name} {short_repr(value)} is not supported: {instead}")

    def _required(self, name: str, default: Any) -> Any:
        value = self._left.pop(name, default)
        if value is None:
            raise UserError(f"{self.where}: {name} is missing")
        return value

    def _wrong(self, name: str, value: Any, kind: str) -> NoReturn:
        raise UserError(f"{self.where}: {name} must be {kind}: {short_repr(value)}")


def _same(actual: Any, value: Any) -> bool:
    return actual == value or (value is None and actual is False)


# Activations by their names in other systems; `config_to_hf` writes the names on the right.
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


def require(config: Any, family: str, **needed: Any) -> None:
    """Check settings that a family of models has no option for.

    Raises:
        UserError: if a setting has a different value.
    """
    if not config.tie_embeddings:
        needed["head_bias"] = False
    for name, value in needed.items():
        if (actual := getattr(config, name)) != value:
            raise UserError(
                f"model.{name} {short_repr(actual)} has no {family} equivalent, only {short_repr(value)} has"
            )
