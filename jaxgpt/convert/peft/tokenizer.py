"""The tokenizer and chat template of a PEFT adapter, if they fit the vocabulary of its base."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.removed_tokens import without_ids_from
from jaxgpt.data.tokenizers.same_ids import same_vocabulary
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.special_files import read_special_files
from jaxgpt.errors import UserError

IGNORED = "the adapter's tokenizer and chat template are ignored"


class AdapterTokenizer(NamedTuple):
    """The tokenizer of an imported adapter."""

    tokenizer: Tokenizer
    note: str  # files of the adapter that are ignored, and why; "": none


def adapter_tokenizer(source: Path, base: Tokenizer, vocab_size: int) -> AdapterTokenizer:
    """Return the tokenizer of an imported adapter.

    An adapter may have been trained with different tokens or a different chat template than its base. The base supplies ids
    and templates that the adapter lacks.

    Args:
        source: directory of the adapter; tokenizer.json and its chat template are optional.
        base: tokenizer of the base.
        vocab_size: number of rows of the embedding.
    """
    if not (source / "tokenizer.json").is_file():
        return _with_template(source, base)
    try:
        complete = load_tokenizer(source)
    except UserError as e:
        return AdapterTokenizer(base, f"{IGNORED}, because they cannot be read: {e}")
    own = without_ids_from(complete, vocab_size)
    if own.vocab_size > vocab_size or not same_vocabulary(own, base):
        return AdapterTokenizer(base, f"{IGNORED}, because its ids differ from the ids of the base's tokenizer")

    own.special = _completed(own.special, base.special)
    note = ""
    if own is not complete:  # `without_ids_from` returns its argument unless it removes tokens
        note = f"the adapter's added tokens with ids above {vocab_size - 1} are ignored: the base has no rows for them"
    return AdapterTokenizer(own, note)


def _with_template(source: Path, base: Tokenizer) -> AdapterTokenizer:
    """Return the tokenizer of the base with the chat template of an adapter that has no tokenizer.json."""
    try:
        special = read_special_files(source).special
    except UserError as e:
        return AdapterTokenizer(base, f"the adapter's chat template is ignored, because it cannot be read: {e}")

    tokenizer = base
    template = special.tokenizer.get("chat_template")
    if template is not None:
        tokenizer = copy(base)
        tokenizer.special = replace(base.special, tokenizer=dict(base.special.tokenizer) | {"chat_template": template})

    has_others = not special.tokens <= base.special.tokens
    note = "the adapter's special tokens are ignored, because it has no tokenizer.json" if has_others else ""
    return AdapterTokenizer(tokenizer, note)


def _completed(own: SpecialTokens, base: SpecialTokens) -> SpecialTokens:
    """Return the special tokens of an adapter; the base supplies missing ids and a missing chat template."""
    entries = dict(own.tokenizer)
    if base.tokenizer.get("chat_template") is not None:
        entries.setdefault("chat_template", base.tokenizer["chat_template"])
    return replace(own, generation=dict(base.generation) | dict(own.generation), tokenizer=entries)
