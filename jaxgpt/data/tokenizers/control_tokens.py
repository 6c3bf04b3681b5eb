"""The control tokens of a tokenizer: their names, and where a text has them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jaxgpt.data.tokenizers.base import Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer


class TokenMatch(NamedTuple):
    """A control token in a text."""

    begin: int  # index of its first character, including white space that the token absorbs
    name_begin: int  # index of its first character without this white space
    end: int
    id: int


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and further added tokens by name.

    Args:
        tokenizer: any tokenizer; tokenizers of bytes or characters have no control tokens.
        further: names of added tokens that are control tokens although they are not special, or, for a tokenizer of
            words, names of words.

    Attributes:
        names: name of each control token, keyed by id.
        normalized: ids of tokens with names that match other spellings, such as capitals.
        has_single_words: whether any token is found only as a separate word (`single_word`).
        first_characters: first characters of the names.
    """

    def __init__(self, tokenizer: Tokenizer, further: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.further = frozenset(further)
        self.names = dict[int, str]()
        self.normalized = set[int]()
        self.has_single_words = False
        if isinstance(tokenizer, SubwordTokenizer):
            for i, token in tokenizer.library.get_added_tokens_decoder().items():
                if token.special or token.content in self.further:
                    self.names[i] = token.content
                    if token.normalized:
                        self.normalized.add(i)
                    self.has_single_words |= token.single_word
        elif type(tokenizer) is WordTokenizer:
            self.names = {i: word for i, word in enumerate(tokenizer.words) if word in self.further}
        self.first_characters = frozenset(name[0] for name in self.names.values())

    def find(self, text: str) -> list[TokenMatch]:
        """Find the control tokens of a text, as a subword tokenizer recognizes them; [] for other tokenizers."""
        if not isinstance(self.tokenizer, SubwordTokenizer):
            return []
        encoding = self.tokenizer.encode_offsets(text)
        matches = []
        for i, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # The id of `<unk>` also encodes unknown characters, which are ordinary text.
            found = text[begin:end]
            if i in self.names and self._spelling(found) == self._spelling(self.names[i]):
                name_begin = end - len(found.lstrip())
                matches.append(TokenMatch(begin, name_begin, end, i))
        return matches

    def _spelling(self, name: str) -> str:
        """Return a normal form of a name: equal for all spellings that match a token, and without white space at the ends."""
        assert isinstance(self.tokenizer, SubwordTokenizer)
        normalizer = self.tokenizer.library.normalizer
        if self.normalized and normalizer is not None:
            name = normalizer.normalize_str(name.strip())
        return name.strip()
