"""Validate and convert the arguments of generation: prompts, lengths, settings, filters and keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from numbers import Number
from typing import Any, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig, TextParams
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.decoding.sampling import Filter, filter_name
from jaxgpt.errors import UserError, short_repr
from jaxgpt.options import NEW_TOKENS
from jaxgpt.settings import as_int
from jaxgpt.suggestions import did_you_mean

Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]  # one prompt, or several


def as_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts; a string or a sequence of ids is one prompt.

    Raises `UserError` for a single value that is not a string, such as a number or a dict.
    """
    rows = [prompts] if isinstance(prompts, str) else as_list(prompts)
    if rows is None:
        raise UserError(f"prompts must be a string, token ids, or a list of either: {short_repr(prompts)}")
    are_ids = bool(rows) and all(isinstance(x, Number) or _is_scalar_array(x) for x in rows)
    return [rows] if are_ids else rows


def encode_prompt(tokenizer: Tokenizer, vocab_size: int, prompt: Any, special: bool = False) -> list[int]:
    """Encode a prompt, a string or ids, for a model of `vocab_size` ids; [] for a string without tokens.

    The tokenizer's `bos_ids` are prepended to the ids of a string, unless the ids begin with `bos_ids` or are []. With
    `special`, names of special tokens in a string are encoded as their ids.

    Raises `UserError` for text or ids outside the vocabulary, an empty list, or a value that is not a prompt.
    """
    if isinstance(prompt, str):
        encode = tokenizer.encode_special if special else tokenizer.encode
        ids = encode(prompt).tolist()
        if ids:
            ids = tokenizer.after_bos(ids)
    else:
        ids = as_list(prompt)
        if not ids:
            raise UserError(f"a prompt must be a string or a list of at least one token id: {short_repr(prompt)}")

    # In the usual case, no id needs a conversion or an error.
    are_ints = all(type(i) is int for i in ids)  # false for bool and NumPy integers
    if are_ints and (not ids or (min(ids) >= 0 and max(ids) < vocab_size)):
        return ids
    checked = []
    for n, i in enumerate(ids):
        name = f"the id at position {n} of the prompt (vocabulary of {vocab_size})"
        checked.append(as_int(name, i, 0, vocab_size - 1))
    return checked


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of an empty prompt: `bos_ids`, otherwise the beginning-of-text id, the end-of-text id, or a newline.

    Raises `UserError` if the tokenizer has none of these tokens.
    """
    if tokenizer.bos_ids:
        return list(tokenizer.bos_ids)
    for i in (tokenizer.special.bos_id, tokenizer.eos_id):
        if i is not None and i < tokenizer.vocab_size:
            return [i]
    with suppress(UserError):  # error if the vocabulary has no newline
        newline: list[int] = tokenizer.encode("\n").tolist()
        if newline:
            return newline
    raise UserError(
        "the prompt is empty, and the tokenizer has no beginning-of-text or end-of-text token or newline: pass a prompt"
    )


def max_new(model: ModelConfig, length: int, text: TextParams) -> int:
    """Return the maximum number of new tokens; raise `UserError` if `max_length` or the context is too short."""
    is_bounded = text.overflow == "error" or (text.overflow == "auto" and model.positions != "rope")
    fitting = max(model.block_size - length + 1, 0)  # including the last token, which is not an input

    if text.max_length is not None:
        new = text.max_length - length
        if new < 1:
            raise UserError(
                f"max_length {text.max_length} leaves no room after a prompt of {length} tokens: raise it above {length}"
            )
    elif text.max_new_tokens:
        new = text.max_new_tokens
    elif is_bounded:
        # Generate one token less than fits: the whole text, including its last token, is then within the context, and can be
        # continued.
        new = min(NEW_TOKENS, max(fitting - 1, 1))
    else:
        new = NEW_TOKENS

    if is_bounded and new > fitting:
        fix = f"generate at most {fitting}" if fitting else "shorten the prompt"
        raise UserError(
            f"a prompt of {length} tokens and {new} new tokens exceed the context length of {model.block_size}: "
            f"{fix}, or use overflow slide, which drops the beginning of the input"
        )
    return new


def make_settings(given: Mapping[str, Any], *classes: type[Any]) -> list[Any]:
    """Make an instance of each dataclass from keyword arguments; raise `UserError` for an invalid name or value.

    The classes have no field names in common. For tuple fields, lists, sets, arrays and single values are converted to tuples.
    """
    types: dict[str, Any] = {}
    for cls in classes:
        types |= get_type_hints(cls)
    for name in given:
        if name not in types:
            raise UserError(f"unknown setting {name}{did_you_mean(name, types)}; use one of {', '.join(types)}")

    values = {}
    for name, value in given.items():
        is_tuple = get_origin(types[name]) is tuple
        values[name] = as_tuple(value) if is_tuple else value
    settings = []
    for cls in classes:
        values_of_class = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        settings.append(cls(**values_of_class))
    return settings


@dataclass(frozen=True)
class CheckedFilter:
    """A custom filter. A call raises `UserError` if the filter converts its arguments to NumPy, or changes shape or dtype."""

    custom: Filter

    @property
    def __name__(self) -> str:
        """Name of the custom filter, for `filter_name`."""
        return filter_name(self.custom)

    def __call__(self, logits_BV: jax.Array, text: TokenBuffer) -> jax.Array:
        """Apply the filter."""
        try:
            out = jnp.asarray(self.custom(logits_BV, text))
        except jax.errors.TracerArrayConversionError:
            raise UserError(
                f"the filter {self.__name__} converts its arguments to NumPy arrays: use jax.numpy"
            ) from None
        found = f"{out.dtype} {list(out.shape)}"
        wanted = f"{logits_BV.dtype} {list(logits_BV.shape)}"
        if found != wanted:
            raise UserError(
                f"the filter {self.__name__} returned {found} for logits of {wanted}: shape and dtype must stay the same"
            )
        return out


def as_filters(filters: Any) -> tuple[Filter, ...]:
    """Return custom filters as a tuple of `CheckedFilter`.

    Raises `UserError` for other values, and for functions that are not hashable: filters are part of a cache key.
    """
    if not isinstance(filters, (list, tuple)) or not all(callable(f) and f.__hash__ for f in filters):
        raise UserError(f"filters must be a list of hashable functions (logits, text) -> logits: {short_repr(filters)}")
    return tuple(map(CheckedFilter, filters))


def row_keys(key: Any, rows: int) -> jax.Array:
    """Return a key for each row: the given keys, or a single key or seed with the row's index folded in.

    Raises `UserError` for any other number of keys.
    """
    keys = as_keys(key)
    if keys.shape == (rows,):
        return keys
    if keys.size == 1:
        return _fold_in(keys.reshape(()), rows)
    raise UserError(f"key has shape {keys.shape}: pass one key, or one per text ({rows})")


@partial(jax.jit, static_argnums=1)  # one program: each operation outside jit takes 10 ms at its first call
def _fold_in(key: jax.Array, rows: int) -> jax.Array:
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows, dtype=jnp.uint32))


def as_keys(key: Any) -> jax.Array:
    """Convert a seed, or keys of either kind (`jax.random.key` or `jax.random.PRNGKey`), to typed keys."""
    if hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    data_shape = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    if getattr(key, "dtype", None) == np.uint32 and np.shape(key)[-1:] == data_shape:
        return jax.random.wrap_key_data(jnp.asarray(key))
    return jax.random.key(as_int("key (a seed, or a jax.random.key)", key, 0, 2**32 - 1))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the items of a list, set or array; a string or a number is one item."""
    items = as_list(value)
    return (value,) if items is None else tuple(items)


def as_list(values: Any) -> list[Any] | None:
    """Return the items of a list, set, iterator or array; None for a single value, such as a string."""
    is_single = isinstance(values, (str, bytes, dict)) or _is_scalar_array(values)
    if is_single or not isinstance(values, Iterable):
        return None
    is_array = hasattr(values, "dtype")
    return np.asarray(values).tolist() if is_array else list(values)


def _is_scalar_array(value: Any) -> bool:
    """Return whether a value is an array without axes, of any library."""
    return getattr(value, "shape", None) == ()
