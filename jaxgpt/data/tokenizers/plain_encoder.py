"""Encode the text between two control tokens; names of control tokens in this text are encoded as text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxgpt.data.tokenizers.control_tokens import ControlTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, call_tokenizers, read_library

BREAK = secrets.token_hex(16)  # token before a text that continues an earlier text; random, so that no text contains it


class Neighbor(NamedTuple):
    """A control token next to a text.

    The text is encoded with its neighbors, because a normalizer may remove or prepend spaces at the ends of a text. As in the
    library, a neighbor with the option `normalized` does not end the text that the normalizer receives.
    """

    text: str  # the random name of the token, with the white space that the token absorbs
    id: int  # id of the random name
    is_normalized: bool


class PlainEncoder:
    """Encodes with a copy of a tokenizer: control tokens have random names, so their own names are ordinary text."""

    def __init__(self, control: ControlTokens) -> None:
        assert isinstance(control.tokenizer, SubwordTokenizer)
        self._normalized = control.normalized
        self._random_names = {i: _random_name(name.strip()) for i, name in control.names.items()}
        self._library = _renamed_copy(control.tokenizer.library, control.further, self._random_names)
        self._break_id = self._library.token_to_id(BREAK)

    def neighbor(self, found: str, token_id: int) -> Neighbor:
        """Return the neighbor for a control token that is found in a text, with the white space that it absorbs."""
        random_name = self._random_names[token_id]
        text = found.replace(found.strip(), random_name, 1)
        return Neighbor(text, self._library.token_to_id(random_name), token_id in self._normalized)

    def encode_between(self, text: str, before: Neighbor | None, after: Neighbor | None) -> list[int]:
        """Encode a text between two control tokens; None: the text begins or ends there."""
        # An empty text has no ids, except before a normalized token: the normalizer may prepend a space to both.
        is_before_normalized = after is not None and after.is_normalized
        if not text and not is_before_normalized:
            return []
        begin = before.text if before else ""
        end = after.text if after else ""
        ids = self._encode(begin + text + end)
        if before:
            ids = ids[ids.index(before.id) + 1 :]
        if after:
            ids = ids[: ids.index(after.id)]
        return ids

    def encode_continuing(self, text: str) -> list[int]:
        """Encode a text as the continuation of any other text."""
        if not text:
            return []
        ids = self._encode(BREAK + text)
        return ids[ids.index(self._break_id) + 1 :]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = call_tokenizers(lambda: self._library.encode(text, add_special_tokens=False).ids, "this text")
        return ids


def _random_name(name: str) -> str:
    """Return a random name with the same first and last character, which may affect adjacent tokens."""
    return name[:1] + secrets.token_hex(16) + name[-1:]


def _renamed_copy(library: Any, further: Collection[str], random_names: Mapping[int, str]) -> Any:
    """Return a copy of the library's tokenizer that encodes names of control tokens as text, and finds the random names.

    Args:
        library: tokenizer of the library.
        further: names of control tokens that are not special.
        random_names: random name of each control token, keyed by id.
    """
    from tokenizers import AddedToken

    # The option `encode_special_tokens` makes the names of special tokens text. It does not affect other added tokens, so the
    # further control tokens become special in the copy.
    tokenizer_json = json.loads(library.to_str())
    for token in tokenizer_json["added_tokens"]:
        token["special"] |= token["content"] in further
    copy = read_library(json.dumps(tokenizer_json), "this vocabulary")
    copy.encode_special_tokens = True
    copy.post_processor = None

    # Each random name gets the white-space and normalization options of its token.
    added = [AddedToken(BREAK, normalized=False)]
    for i, token in library.get_added_tokens_decoder().items():
        if i in random_names:
            options = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": token.normalized}
            added.append(AddedToken(random_names[i], **options))
    copy.add_tokens(added)
    return copy
