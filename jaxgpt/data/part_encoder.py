"""Encode a text in parts, with control tokens only where the template wrote them."""

from __future__ import annotations

import json
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from jaxgpt.data.continuation import ANCHORS
from jaxgpt.data.control_tokens import ControlTokens, TokenMatch, not_text
from jaxgpt.data.subword import SubwordTokenizer, call_tokenizers

BREAK = secrets.token_hex(16)  # token before a text that continues an earlier text; random, so that no text contains it
ANCHOR = "\ufdd0"  # noncharacter that never shares a token with the text after it


class PartedText(NamedTuple):
    """A text that is given in parts."""

    text: str  # all parts
    ends: list[int]  # index of the end of each part

    @staticmethod
    def of(parts: Sequence[str]) -> PartedText:
        """Join parts."""
        return PartedText("".join(parts), list(accumulate(map(len, parts))))

    def part_of(self, index: int) -> int:
        """Return the part with the character at an index."""
        return bisect_right(self.ends, index)

    def begin_of(self, part: int) -> int:
        """Return the index of the first character of a part."""
        return self.ends[part - 1] if part else 0

    def bounds(self, begin: int, end: int) -> list[int]:
        """Return the indices from `begin` to `end` at which a part begins, and `begin` and `end`."""
        return [begin, *(at for at in self.ends if begin < at < end), end]


class Neighbor(NamedTuple):
    """A control token next to a text, with a random name: in the plain tokenizer, the names of control tokens are text.

    The text is encoded with its neighbors, because a normalizer may remove or prepend spaces at the ends of a text. As in the
    library, a neighbor with the option `normalized` does not end the text that the normalizer receives.
    """

    text: str  # the random name, with the white space that the token absorbs
    id: int  # id in the plain tokenizer
    is_normalized: bool


class PartEncoder:
    """Encodes texts that are given in parts, such as the parts of a conversation.

    Args:
        control: the control tokens of a tokenizer.
    """

    def __init__(self, control: ControlTokens) -> None:
        self.control = control
        self.tokenizer = control.tokenizer

    def encode(self, parts: Sequence[str], mark: str = "") -> list[list[int]]:
        """Encode a text that is given in parts; names without a mark become control tokens, names with a mark become text.

        No token extends over two parts. The ids of the first parts do not depend on later parts. If the tokenizer
        separates the parts anyway, the ids are equal to the ids of the joined text.

        Raises:
            UserError: if the tokenizer cannot encode the text, or only with a control token for a name in the text.
        """
        if not isinstance(self.tokenizer, SubwordTokenizer):
            return [self.tokenizer.encode(part).tolist() for part in parts]
        parted = PartedText.of(parts)
        encoded: list[list[int]] = [[] for _ in parts]
        begin = 0
        before: Neighbor | None = None
        for match in self._unmarked_in_parts(parted, mark):
            # A token absorbs white space before it only within its part, because the ids of a part do not depend on later
            # parts.
            name = parted.text[match.begin : match.end]
            part = parted.part_of(match.end - len(name.lstrip()))
            begin_of_part = parted.begin_of(part)
            end = max(match.begin, begin_of_part)

            token = self._neighbor(parted.text[end : match.end], match.id)
            is_in_part = end > begin_of_part or begin == end  # otherwise, the text before the token is in earlier parts
            after = token if is_in_part else None
            for number, ids in self._encode_text(parted, begin, end, before, after, mark):
                encoded[number] += ids
            encoded[part].append(match.id)
            begin = match.end
            before = token
        for number, ids in self._encode_text(parted, begin, len(parted.text), before, None, mark):
            encoded[number] += ids
        return encoded

    def _neighbor(self, found: str, token_id: int) -> Neighbor:
        """Return the neighbor for a control token that is found in a text, with the white space that it absorbs."""
        random_name = self._random_names[token_id]
        text = found.replace(found.strip(), random_name, 1)
        return Neighbor(text, self._plain.token_to_id(random_name), token_id in self.control.normalized)

    def _encode_text(
        self, parted: PartedText, begin: int, end: int, before: Neighbor | None, after: Neighbor | None, mark: str
    ) -> Iterator[tuple[int, list[int]]]:
        """Encode the text from index `begin` to `end`, between two control tokens; None: no token.

        Yields:
            The index of each part in the text, and its ids.
        """
        bounds = parted.bounds(begin, end)
        pieces = [parted.text[a:b] for a, b in pairwise(bounds)]
        if mark:
            pieces = [piece.replace(mark, "") for piece in pieces]
        for first, ids in zip(bounds[:-1], self._encode_pieces(pieces, before, after), strict=True):
            if ids:  # an empty piece may be at the end of the text, after the last part
                yield parted.part_of(first), ids

    def _unmarked_in_parts(self, parted: PartedText, mark: str) -> list[TokenMatch]:
        """Find the control tokens of a text in parts: a part ends a word, because its ids do not depend on later parts."""
        if not self.control.has_single_words:
            return self.control.unmarked(parted.text, mark)
        matches = []
        for begin, end in pairwise([0, *parted.ends]):
            for match in self.control.unmarked(parted.text[:end], mark):
                name = parted.text[match.begin : match.end].lstrip()
                if match.end - len(name) >= begin:
                    matches.append(match)
        return matches

    def _encode_pieces(self, pieces: Sequence[str], start: Neighbor | None, end: Neighbor | None) -> list[list[int]]:
        """Encode consecutive pieces of text without control tokens, between two control tokens; None: no token."""
        out = list[list[int]]()
        before = list[int]()
        for n, piece in enumerate(pieces, 1):
            is_last = n == len(pieces)
            whole = self._encode_between("".join(pieces[:n]), start, end if is_last else None)
            ids = whole[len(before) :]
            if whole[: len(before)] != before:  # a token would extend over two pieces
                ids = self._encode_after(before, piece, whole)
            self._check_text(piece, ids)
            out.append(ids)
            before = before + ids
        return out

    def _encode_between(self, text: str, start: Neighbor | None, end: Neighbor | None) -> list[int]:
        """Encode text in which all names are text, between two control tokens; None: the text begins or ends there."""
        # A normalizer may prepend a space to an empty text before a normalized token.
        if not text and not (end and end.is_normalized):
            return []
        first = start.text if start else ""
        last = end.text if end else ""
        ids = self._encode_plain(first + text + last)
        if start:
            ids = ids[ids.index(start.id) + 1 :]
        if end:
            ids = ids[: ids.index(end.id)]
        return ids

    def _encode_after(self, before: list[int], piece: str, whole: list[int]) -> list[int]:
        """Encode a piece of text separately from the preceding text, without the space that some tokenizers prepend.

        Args:
            before: ids of the preceding text.
            piece: text to encode.
            whole: ids of both texts together; one token extends over the end of the first text. They show the text that
                the tokenizer keeps: a normalizer may replace line breaks with spaces, for example.
        """
        decode = self.tokenizer.decode
        wanted = {decode(before) + piece, decode(whole)}
        alone = self._encode_continuing(piece)
        for ids in [alone, *self._after_anchors(piece)]:
            if decode(before + ids) in wanted:
                return ids
        return alone

    def _after_anchors(self, piece: str) -> Iterator[list[int]]:
        """Yield the ids of a text after each anchor, except anchors that share a token with the text."""
        for anchor in (ANCHOR, *ANCHORS):
            ids = self._encode_continuing(anchor)
            joined = self._encode_continuing(anchor + piece)
            if joined[: len(ids)] == ids:
                yield joined[len(ids) :]

    def _check_text(self, text: str, ids: list[int]) -> None:
        """Check that ordinary text has no id of a control token: the vocabulary of some models contains the names."""
        for i in self.control.names.keys() & set(ids):
            if self.control.names[i] in text:
                raise not_text(self.control.names[i])

    def _encode_continuing(self, text: str) -> list[int]:
        """Encode text in which all names are text, as the continuation of a text."""
        return self._encode_plain(BREAK + text)[1:] if text else []

    def _encode_plain(self, text: str) -> list[int]:
        """Encode text in which all names are text, with random names."""
        ids: list[int] = call_tokenizers(lambda: self._plain.encode(text, add_special_tokens=False).ids, "this text")
        return ids

    @cached_property
    def _random_names(self) -> dict[int, str]:
        """A random name for each control token, with the same first and last character, which may affect adjacent tokens."""
        names = {i: name.strip() for i, name in self.control.names.items()}
        return {i: name[:1] + secrets.token_hex(16) + name[-1:] for i, name in names.items()}

    @cached_property
    def _plain(self) -> Any:
        """A copy of the tokenizer that encodes names of control tokens as text, with `BREAK` and the random names as tokens."""
        from tokenizers import AddedToken

        assert isinstance(self.tokenizer, SubwordTokenizer)
        text = self.tokenizer.library.to_str()

        # With `encode_special_tokens`, only special tokens are text: make all control tokens special.
        added = self.tokenizer.library.get_added_tokens_decoder().values()
        if any(token.content in self.control.further and not token.special for token in added):
            value = json.loads(text)
            for token in value["added_tokens"]:
                token["special"] |= token["content"] in self.control.further
            text = json.dumps(value)

        library = type(self.tokenizer.library)
        copy = call_tokenizers(lambda: library.from_str(text), "this vocabulary")
        copy.post_processor = None

        # Each random name has the matching options of its token.
        further = [AddedToken(BREAK, normalized=False)]
        for i, token in self.tokenizer.library.get_added_tokens_decoder().items():
            if i in self.control.names:
                options = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": token.normalized}
                further.append(AddedToken(self._random_names[i], **options))
        copy.add_tokens(further)
        copy.encode_special_tokens = True
        return copy
