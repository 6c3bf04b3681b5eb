"""Read the config.json of another system so that no option is overlooked: each is used, known not to matter, or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxgpt.config import UserError
from jaxgpt.errors import short_repr

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

# Options that would change the logits, with the one value that does not.
NEUTRAL: dict[str, Any] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "pruned_heads": {},
}
# The same, where the user may know better: weights are read only if they are plain numbers, whatever this option says.
DOUBTFUL: dict[str, Any] = {"quantization_config": None, "rope_interleaved": False}


class Options:
    """The options of a config.json. Each is read once; `done` refuses those that nothing has read."""

    def __init__(
        self, values: Mapping[str, Any], where: str, accept: Collection[str] = (), outer: Options | None = None
    ) -> None:
        """Drop the harmless options, and check the neutral ones.

        Args:
            values: the content of config.json.
            where: its path, for errors.
            accept: options that would be refused, and that the user wants to be ignored.
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
        """Take an integer; the default stands for null as well."""
        value = self._take(name, default)
        if type(value) is not int:
            raise UserError(f"{self.where}: {name} must be an integer: {short_repr(value)}")
        return value

    def is_null(self, name: str) -> bool:
        """Return whether the file says null, which in some families is not the default."""
        return name in self._null

    def number(self, name: str, default: float | None = None) -> float:
        """Take a number."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{self.where}: {name} must be a number: {short_repr(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Take true or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {name} must be true or false: {short_repr(value)}")
        return value

    def choice(self, name: str, known: Mapping[str, T], default: str) -> T:
        """Take a name, and return what it stands for here."""
        value = self._take(name, default)
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{self.where}: {name} {short_repr(value)} is not supported: one of {', '.join(known)}")
        return known[value]

    def only(self, name: str, value: Any) -> None:
        """Take an option of which one value is supported.

        Raises:
            UserError: it has another.
        """
        found = self._left.pop(name, value)
        if not _same(found, value):
            raise UserError(f"{self.where}: {name} {short_repr(found)} is not supported, only {short_repr(value)}")

    def expect(self, name: str, value: Any) -> None:
        """Take an option of which one value is supported, unless the user accepts another.

        Raises:
            UserError: it has another.
        """
        found = self._left.pop(name, value)
        if _same(found, value):
            return
        if name not in self._accept:
            raise UserError(
                f"{self.where}: {name} {short_repr(found)} is not supported, only {short_repr(value)}: if it does not change "
                f"the logits, import with --accept-option {name}"
            )
        self._accepted.add(name)

    def skip(self, *names: str) -> None:
        """Drop options that do not change the logits of this family."""
        for name in names:
            self._left.pop(name, None)

    def take(self, name: str, default: Any = None) -> Any:
        """Take an option of any type; the default if it is absent, None if it is null."""
        return self._left.pop(name, None if name in self._null else default)

    def inner(self, name: str, values: Mapping[str, Any]) -> Options:
        """Return the options of an object in the file. What the user accepts is accepted there as well."""
        return Options(values, f"{self.where}: {name}", outer=self)

    def done(self, instead: str = "") -> None:
        """Check that every option was read or accepted.

        Args:
            instead: what to do about unknown options if none can be accepted.

        Raises:
            UserError: some are unknown; or an accepted one would not have been refused.
        """
        unknown = sorted(name for name in self._left if name not in self._accept)
        if unknown:
            listed = ", ".join(f"{name} ({short_repr(self._left[name])})" for name in unknown)
            instead = instead or (
                f"if the logits do not depend on {'them' if len(unknown) > 1 else 'it'}, import with --accept-option "
                f"{' '.join(unknown)}"
            )
            raise UserError(f"{self.where}: unknown option{'s' * (len(unknown) > 1)} {listed}: {instead}")
        self._accepted.update(self._left)
        needless = [name for name in self._accept if name not in self._accepted]
        if needless and not self._outer:
            raise UserError(f"--accept-option {needless[0]}: {self.where} has no such option that would be refused")

    def refuse(self, name: str, value: Any, instead: str) -> UserError:
        """Return the error for a value that is not supported."""
        return UserError(f"{self.where}: {name} {short_repr(value)} is not supported: {instead}")

    def _take(self, name: str, default: Any) -> Any:
        value = self._left.pop(name, default)
        if value is None:
            raise UserError(f"{self.where}: {name} is missing")
        return value


def _same(found: Any, value: Any) -> bool:
    return found == value or (value is None and found is False)


# Activations by the names that other systems give them; `config_to_hf` writes the names on the right.
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
        UserError: a setting has another value; it is named.
    """
    for name, value in needed.items():
        found = getattr(config, name)
        if found != value:
            raise UserError(
                f"model.{name} {short_repr(found)} has no {family} equivalent, only {short_repr(value)} has"
            )
