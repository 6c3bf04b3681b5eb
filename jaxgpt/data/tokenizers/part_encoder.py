"""Encode a text in parts, with control tokens only where the template wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from jaxgpt.data.tokenizers.continuation import ANCHORS
from jaxgpt.data.tokenizers.control_tokens import ControlTokens, TokenMatch
from jaxgpt.data.tokenizers.marks import not_text, unmarked
from jaxgpt.data.tokenizers.parted_text import PartedText
from jaxgpt.data.tokenizers.plain_encoder import Neighbor, PlainEncoder
from jaxgpt.data.tokenizers.subword import SubwordTokenizer

ANCHOR = "\ufdd0"  # noncharacter that never shares a token with the text after it


class Gap(NamedTuple):
    """The text between two control tokens, or at an end of the text."""

    begin: int
    end: int
    before: Neighbor | None  # the control token before the text; None: the text begins there
    after: Neighbor | None  # the control token after the text, if the ids depend on it


class PartIds(NamedTuple):
    """The ids of a part of a text, or of a piece of it between two control tokens."""

    part: int  # index of the part
    ids: list[int]


class PartEncoder:
    """Encodes texts that are given in parts, such as the parts of a conversation.

    Args:
        control: the control tokens of a tokenizer.
    """

    def __init__(self, control: ControlTokens) -> None:
        self.control = control
        self.tokenizer = control.tokenizer

    @cached_property
    def _plain(self) -> PlainEncoder:
        return PlainEncoder(self.control)

    def encode(self, parts: Sequence[str], mark: str = "") -> list[list[int]]:
        """Encode a text that is given in parts; names without a mark become control tokens, names with a mark become text.

        No token extends over two parts. The ids of the first parts do not depend on later parts. If the
        tokenizer would encode the parts independently, the ids are equal to the ids of the joined text.

        Raises:
            UserError: if the tokenizer cannot encode the text, or only with a control token for a name in the text.
        """
        if not isinstance(self.tokenizer, SubwordTokenizer):
            return [self.tokenizer.encode(part).tolist() for part in parts]
        parted = PartedText.of(parts)
        encoded: list[list[int]] = [[] for _ in parts]
        for part, ids in self._encode_pieces_and_tokens(parted, mark):
            encoded[part] += ids
        return encoded

    def _encode_pieces_and_tokens(self, parted: PartedText, mark: str) -> Iterator[PartIds]:
        """Yield the ids of a text in order: control tokens, and the pieces of text between them."""
        begin = 0  # end of the last control token
        before: Neighbor | None = None
        for match in self._unmarked_in_parts(parted, mark):
            place = parted.place_of(match)
            token = self._plain.neighbor(parted.text[place.begin : place.end], match.id)

            # If the text before the token is in earlier parts only, its ids do not depend on the token.
            is_in_part = place.begin > parted.begin_of(place.part) or begin == place.begin
            gap = Gap(begin, place.begin, before, token if is_in_part else None)
            yield from self._encode_gap(parted, gap, mark)
            yield PartIds(place.part, [match.id])
            begin = place.end
            before = token

        yield from self._encode_gap(parted, Gap(begin, len(parted.text), before, None), mark)

    def _encode_gap(self, parted: PartedText, gap: Gap, mark: str) -> Iterator[PartIds]:
        """Yield the ids of the text between two control tokens, divided at the ends of parts."""
        bounds = parted.bounds(gap.begin, gap.end)
        pieces = [parted.text[a:b] for a, b in pairwise(bounds)]
        if mark:
            pieces = [piece.replace(mark, "") for piece in pieces]
        for first, ids in zip(bounds[:-1], self._encode_pieces(pieces, gap.before, gap.after), strict=True):
            if ids:  # an empty piece may be at the end of the text, after the last part
                yield PartIds(parted.part_of(first), ids)

    def _unmarked_in_parts(self, parted: PartedText, mark: str) -> list[TokenMatch]:
        """Find the control tokens of a text in parts: a part ends a word, because its ids do not depend on later parts."""
        if not self.control.has_single_words:
            return unmarked(self.control, parted.text, mark)
        matches = []
        for begin, end in pairwise([0, *parted.ends]):
            for match in unmarked(self.control, parted.text[:end], mark):
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
            whole = self._plain.encode_between("".join(pieces[:n]), start, end if is_last else None)
            ids = whole[len(before) :]
            if whole[: len(before)] != before:  # a token would extend over two pieces
                ids = self._encode_after(before, piece, whole)
            self._check_text(piece, ids)
            out.append(ids)
            before = before + ids
        return out

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
        alone = self._plain.encode_continuing(piece)
        for ids in [alone, *self._after_anchors(piece)]:
            if decode(before + ids) in wanted:
                return ids
        return alone

    def _after_anchors(self, piece: str) -> Iterator[list[int]]:
        """Yield the ids of a text after each anchor, except anchors that share a token with the text."""
        for anchor in (ANCHOR, *ANCHORS):
            ids = self._plain.encode_continuing(anchor)
            joined = self._plain.encode_continuing(anchor + piece)
            if joined[: len(ids)] == ids:
                yield joined[len(ids) :]

    def _check_text(self, text: str, ids: list[int]) -> None:
        """Check that ordinary text has no id of a control token: the vocabulary of some models contains the names."""
        for i in self.control.names.keys() & set(ids):
            if self.control.names[i] in text:
                raise not_text(self.control.names[i])
