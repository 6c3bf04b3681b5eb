"""Compare llama.cpp's tokenizer of a GGUF file with the original tokenizer, by the ids of texts and of added tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken

from jaxgpt.data.tokenizers.base import CharTokenizer, Tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

# Texts for comparing the tokenizer of a file with the original.
PROBES = (
    "def f(x):\n    return  x**2 + 1000000\t# ok\r\n\r\n",
    "a     b          c\n\n\n   d",
    "I'll we've CAN'T it's 12345678901 3.14 \u00bd",
    "na\u00efve caf\u00e9 \u2014 \u201cquotes\u201d \u2026 \u20ac5",
    "\u6f22\u5b57\u3068\u304b\u306a\u3001\ud55c\uad6d\uc5b4 \u05d0\u05d1\u05d2 \u0639\u0631\u0628\u064a",
    "\U0001f468\u200d\U0001f469 \U0001f44d\U0001f3fd <|endoftext|> <s> </s> <unk> leading and trailing  ",
    " one space before",
    "   three spaces before",
    "\n\n line breaks before",
)
# Text with an added token at both ends, and adjacent to spaces, letters, line breaks and itself.
AROUND = "{0} a {0}b{0}  c {0}\n{0}{0} d\n {0}"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # options of added tokens without an equivalent in llama.cpp


def compare(exported: Tokenizer, original: Tokenizer) -> str:
    """Compare the tokenizer of a file with the original; return a note on texts with different ids, or "".

    The note is about special tokens and leading spaces.

    Args:
        exported: tokenizer read from the file, which computes the same ids as llama.cpp.
        original: tokenizer of the run.

    Raises:
        UserError: if ids differ in a way that the note does not describe.
    """
    scheme = space_scheme(original)
    adds_spaces = scheme != "never"  # llama.cpp adds a space to more texts than the original
    different = [token for token in _added_tokens(original) if _differs(token, exported, original, adds_spaces)]
    notes = [spaces_note(scheme), _tokens_note(different)]
    note = "; ".join(filter(None, notes))

    _check_bos(exported, original)
    _check_added(different)
    # If there is a note, special tokens in a text may differ, so their names are compared only as plain text.
    for text in _probes(original, adds_spaces):
        if not _same_ids(exported, original, text, special=note == ""):
            raise UserError(f"llama.cpp has no tokenizer that computes the same ids for {text!r}: export a directory")
    return note


def space_scheme(tokenizer: Tokenizer) -> str:
    """Return the `prepend_scheme` of a tokenizer; never: also without a tokenizer.json."""
    if not isinstance(tokenizer, SubwordTokenizer):
        return "never"
    return prepend_scheme(json.loads(tokenizer.library.to_str()))


def spaces_note(scheme: str) -> str:
    """Describe the texts that begin with an added space only in llama.cpp, by the original's `prepend_scheme`; "": none."""
    if scheme == "never":
        return ""
    others = "texts that begin with a space"
    if scheme == "first":
        others += ", and to texts after a special token"
    return f"unlike this tokenizer, llama.cpp adds a space to {others}"


def _check_bos(exported: Tokenizer, original: Tokenizer) -> None:
    """Raise `UserError` if texts begin with different tokens."""
    if exported.bos_ids != original.bos_ids:
        raise UserError(
            f"llama.cpp begins a text with at most one token, but this tokenizer with {original.decode(original.bos_ids)}: "
            f"export a directory"
        )


def _check_added(different: Sequence[AddedToken]) -> None:
    """Raise `UserError` if any differently matched token is not special, because any text may contain it."""
    for token in different:
        if not token.special:
            raise UserError(
                f"llama.cpp cannot match the added token {_shown(token)} as tokenizer.json does: export a directory"
            )


def _probes(tokenizer: Tokenizer, adds_spaces: bool) -> list[str]:
    """Return the texts whose ids must be equal; `adds_spaces`: llama.cpp adds a space before a leading space."""
    probes = [text for text in PROBES if not (adds_spaces and text.startswith(" "))]
    if isinstance(tokenizer, CharTokenizer):
        return ["".join(character for character in text if character in tokenizer.words) for text in probes]
    return probes


def _tokens_note(different: Sequence[AddedToken]) -> str:
    """Describe the special tokens that llama.cpp matches differently; "": none."""
    special = [token for token in different if token.special]
    if not special:
        return ""
    more = f" and {len(special) - 1:,} more" if len(special) > 1 else ""
    return f"llama.cpp matches the special token {_shown(special[0])}{more} differently between other texts"


def _differs(token: AddedToken, exported: Tokenizer, original: Tokenizer, adds_spaces: bool) -> bool:
    """Return whether llama.cpp matches an added token differently.

    If llama.cpp adds spaces, all ids around tokens differ, so the result depends only on the options of the token.
    """
    if adds_spaces:
        return token.single_word or token.lstrip or token.rstrip
    return not _same_ids(exported, original, AROUND.format(token.content))


def _added_tokens(tokenizer: Tokenizer) -> list[AddedToken]:
    """Return the added tokens of a tokenizer, in the order of their ids."""
    if not isinstance(tokenizer, SubwordTokenizer):
        return []
    return [token for _, token in sorted(tokenizer.library.get_added_tokens_decoder().items())]


def _shown(token: AddedToken) -> str:
    """Format an added token with its options that llama.cpp lacks."""
    flags = [name for name in FLAGS if getattr(token, name)]
    return f"{token.content!r} ({' and '.join(flags)})" if flags else repr(token.content)


def _same_ids(one: Tokenizer, other: Tokenizer, text: str, special: bool = True) -> bool:
    """Return whether two tokenizers encode a text equally, as plain text and, if `special`, with its special tokens."""
    as_text = np.array_equal(one.encode(text), other.encode(text))
    return as_text and (not special or np.array_equal(one.encode_special(text), other.encode_special(text)))


def prepend_scheme(content: Mapping[str, Any]) -> str:
    """Return the `prepend_scheme` of the Metaspace of a tokenizer.json: first, always or never (also without Metaspace)."""
    pre = content["pre_tokenizer"] or {}
    return pre.get("prepend_scheme", "never")
