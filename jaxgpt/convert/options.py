"""Another system's config.json, read so that no option is passed over: each is taken, known to be harmless, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from jaxgpt.config import UserError
from jaxgpt.errors import shown

T = TypeVar("T")

# What says nothing about the logits: names, ids of special tokens, how outputs are packed, how weights were once drawn.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attn_implementation
    auto_map bos_token_id dtype eos_token_id finetuning_task id2label initializer_range is_decoder label2id model_type
    output_attentions output_hidden_states pad_token_id prefix problem_type return_dict sep_token_id
    task_specific_params tokenizer_class torch_dtype torchscript transformers_version unk_token_id use_cache
    """.split()
)

# What would change them, with the one value of each that changes nothing.
NEUTRAL: dict[str, Any] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "quantization_config": None,
    "tie_encoder_decoder": False,
}


class Options:
    """The options of a config.json; each is read once, and `done` refuses those that nobody read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._left = {k: v for k, v in values.items() if k not in HARMLESS}
        for name, value in NEUTRAL.items():
            self.only(name, value)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; the default stands for null too."""
        value = self._take(name, default)
        if type(value) is not int:
            raise UserError(f"{self.where}: {name} must be a whole number, not {shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{self.where}: {name} must be a number, not {shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {name} must be true or false, not {shown(value)}")
        return value

    def choice(self, name: str, known: Mapping[str, T], default: str) -> T:
        """A word, as what we call it."""
        value = self._take(name, default)
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{self.where}: {name} {shown(value)} is not computed here: one of {', '.join(known)}")
        return known[value]

    def only(self, name: str, value: Any) -> None:
        """An option that has to be what we compute anyway, or absent."""
        found = self._left.pop(name, value)
        if found != value and not (found is None or (value is None and found is False)):
            raise UserError(f"{self.where}: {name} {shown(found)} is not computed here, only {shown(value)}")

    def skip(self, *names: str) -> None:
        """Options that this model's logits do not depend on."""
        for name in names:
            self._left.pop(name, None)

    def take(self, name: str) -> Any:
        """An option of any kind, or None."""
        return self._left.pop(name, None)

    def done(self) -> None:
        """Nothing may be left.

        Raises:
            UserError: with the name of an option that is not known here.
        """
        if self._left:
            name = min(self._left)
            raise UserError(
                f"{self.where}: option {name} ({shown(self._left[name])}) is not known here: refused, not ignored"
            )

    def refuse(self, name: str, value: Any, instead: str) -> UserError:
        """The error for a value that is not computed."""
        return UserError(f"{self.where}: {name} {shown(value)} is not computed here: {instead}")

    def _take(self, name: str, default: Any) -> Any:
        value = self._left.pop(name, None)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.where}: {name} is missing")
        return value


# Their names of activations that we have, and the name that we write for each of ours.
ACTIVATIONS = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


def require(config: Any, family: str, **needed: Any) -> None:
    """Settings that a family of models takes for granted.

    Raises:
        UserError: a setting has another value; it is named.
    """
    for name, value in needed.items():
        found = getattr(config, name)
        if found != value:
            raise UserError(
                f"model.{name} {shown(found)} cannot be said in a {family} config.json, which has {shown(value)} only"
            )
