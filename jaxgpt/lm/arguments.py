"""Validate the arguments of generation: prompts, lengths, settings, stop ids and keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Number
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import NEW_TOKENS, ModelConfig, TextParams
from jaxgpt.data import Tokenizer
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.settings import as_int

Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]  # one prompt, or several
INT64 = (-(2**63), 2**63 - 1)


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
        ids: input of the model; for an empty prompt, the ids that precede a new text.
        text_ids: ids of the prompt's text: `ids`, or none for an empty prompt.
    """

    ids: list[int]
    text_ids: list[int]


def make_settings(given: Mapping[str, Any], *classes: type[Any]) -> list[Any]:
    """Make one instance of each dataclass from keyword arguments.

    Raises:
        UserError: if no class has a setting of this name, or a value is invalid.
    """
    known = {field.name: cls for cls in classes for field in fields(cls)}
    for name in given:
        if name not in known:
            raise UserError(f"unknown setting {name}{did_you_mean(name, known)}; use one of {', '.join(known)}")
    given = {name: as_tuple(value) if name in ("stop", "stop_ids") else value for name, value in given.items()}
    return [cls(**{name: value for name, value in given.items() if known[name] is cls}) for cls in classes]


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the items of a list, set or array; a string or a number is one item."""
    one = isinstance(value, (str, bytes)) or not isinstance(value, Iterable) or getattr(value, "shape", 1) == ()
    return (value,) if one else tuple(value)


def as_prompts(prompts: Any) -> list[str | Sequence[int]]:
    """Convert to a list of prompts. A string or a sequence of ids is one prompt.

    Raises:
        UserError: if it is neither a string nor a sequence.
    """
    if isinstance(prompts, str):
        return [prompts]
    rows = _as_list(prompts, "prompts must be a string, token ids, or a list of either")
    return [rows] if rows and all(isinstance(x, Number) or getattr(x, "shape", None) == () for x in rows) else rows


def _as_list(values: Any, what: str) -> list[Any]:
    if isinstance(values, (bytes, dict)) or not isinstance(values, Iterable) or getattr(values, "shape", (1,)) == ():
        raise UserError(f"{what}: {short_repr(values)}")
    return np.asarray(values).tolist() if hasattr(values, "dtype") else list(values)


def encode_prompt(tokenizer: Tokenizer, vocab_size: int, prompt: Any, special: bool = False) -> Prompt:
    """Encode a prompt.

    A string is preceded by the tokenizer's `bos_ids`, unless it begins with them; an empty string becomes the ids that
    `start_ids` returns. Ids are used as they are.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: vocabulary size of the model.
        prompt: a string or ids.
        special: encode the names of special tokens in a string as their ids.

    Raises:
        UserError: if there are no ids, ids that are not integers, or ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        ids = (tokenizer.encode_special if special else tokenizer.encode)(prompt).tolist()
        before = list(tokenizer.bos_ids)
        if ids and ids[: len(before)] != before:
            ids = before + ids
        encoded = Prompt(ids, ids) if ids else Prompt(start_ids(tokenizer)[0], [])
    else:
        places = enumerate(_as_list(prompt, "a prompt must be a string or a list of token ids"))
        ids = [as_int(f"the id at position {i} of the prompt", x, *INT64) for i, x in places]
        if not ids:
            raise UserError("the prompt has no ids: pass at least one")
        encoded = Prompt(ids, ids)
    for place, i in enumerate(encoded.ids):
        if not 0 <= i < vocab_size:
            raise UserError(f"id {i} at position {place} of the prompt is outside the vocabulary of {vocab_size}")
    return encoded


def start_ids(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Return the ids that precede a new text, and their description.

    They are the tokenizer's `bos_ids`, otherwise the model's beginning token, the end token, or a newline.

    Raises:
        UserError: if the tokenizer has none of them.
    """
    named, V = tokenizer.special.bos_id, tokenizer.vocab_size
    begins = [] if named is None or named >= V or named == tokenizer.eos_id else [named]
    if before := list(tokenizer.bos_ids) or begins:
        return before, "the beginning token"
    if tokenizer.eos_id is not None:
        return [tokenizer.eos_id], "the end token"
    try:
        ids: list[int] = tokenizer.encode("\n").tolist()
    except UserError:
        ids = []
    if not ids:
        raise UserError(
            "the prompt is empty, and this tokenizer has no end token or new line to start from: pass a prompt"
        )
    return ids, "a new line"


def fit_context(model: ModelConfig, prompts: Sequence[Prompt], text: TextParams) -> list[int]:
    """Return the maximum number of new tokens after each prompt.

    Raises:
        UserError: if a text exceeds the context, or a prompt exceeds `max_length`.
    """
    bounded = text.overflow == "error" or (text.overflow == "auto" and model.positions != "rope")
    lengths = [len(prompt.ids) for prompt in prompts]
    if text.max_length is not None:
        if lengths and text.max_length <= max(lengths):
            raise UserError(
                f"the prompt of {max(lengths)} tokens leaves no room for new ones: raise max-length {text.max_length}"
            )
        new = [text.max_length - length for length in lengths]
    elif text.max_new_tokens is not None:
        new = [text.max_new_tokens] * len(prompts)
    else:
        new = [min(NEW_TOKENS, max(model.block_size - n, 1)) if bounded else NEW_TOKENS for n in lengths]
    for length, n in zip(lengths, new, strict=True) if bounded else ():
        if length + n - 1 > model.block_size:
            raise UserError(
                f"a prompt of {length} tokens and {n} new tokens exceed the context length of {model.block_size}: "
                f"generate at most {max(model.block_size - length + 1, 0)}, or use overflow slide, "
                f"which drops the beginning of the text"
            )
    return new


def all_stop_ids(tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int] = ()) -> tuple[int, ...]:
    """Return stop ids and the tokenizer's end tokens.

    Raises:
        UserError: if an id is outside the vocabulary.
    """
    for i in stop_ids:
        if not 0 <= i < vocab_size:
            raise UserError(f"stop id {i} is outside the vocabulary of {vocab_size}")
    return tuple(sorted({*stop_ids, *(i for i in tokenizer.end_ids if i < vocab_size)}))


def row_keys(key: Any, rows: int) -> jax.Array:
    """Make a key for each row.

    Args:
        key: a seed or a key, typed (`jax.random.key`) or legacy (`jax.random.PRNGKey`), which is folded with the row's index;
            or an array of keys, one per row, used unchanged.
        rows: number of rows.

    Raises:
        UserError: if there is neither a seed nor keys, or the wrong number of keys.
    """
    keys = as_keys(key)
    if keys.shape == (rows,):
        return keys
    if keys.size == 1:
        fold_B = jnp.arange(rows, dtype=jnp.uint32)
        return jax.vmap(lambda i: jax.random.fold_in(keys.reshape(()), i))(fold_B)
    raise UserError(f"key has shape {keys.shape}: pass one key, or one per text ({rows})")


def as_keys(key: Any) -> jax.Array:
    """Convert a seed of any integer type, or keys of either kind, to typed keys.

    Raises:
        UserError: if there is neither a seed nor keys.
    """
    if hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    words = jax.random.key_data(jax.random.key(0)).shape
    if getattr(key, "dtype", None) == np.uint32 and np.shape(key)[-1:] == words:
        return jax.random.wrap_key_data(jnp.asarray(key))
    if isinstance(key, (list, tuple, str, float)) or np.ndim(key):
        raise UserError(f"key must be an integer (a seed), a jax.random.key or an array of keys: {short_repr(key)}")
    return jax.random.key(as_int("a seed", key, 0, 2**32 - 1))
