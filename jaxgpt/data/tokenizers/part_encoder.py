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


class TextBetween(NamedTuple):
    """The text between two control tokens, or between a control token and an end of the text."""

    begin: int
    end: int
    before: Neighbor | None  # the control token before the text; None: the text begins there
    after: Neighbor | None  # the control token after the text, if the ids of the text depend on it


class PartIds(NamedTuple):
    """The ids of a control token or a piece of text in a part."""

    part: int  # index of the part
    ids: list[int]


class PartEncoder:
    """Encodes texts that are given in parts, such as the parts of a conversation.

    The ends of parts divide the text between two control tokens into pieces. Example: the parts `<|user|>Hi` and ` you<|end|>`
    have the text `Hi you` between two control tokens; its pieces are `Hi` and ` you`.

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
        for part, ids in self._encode_in_order(parted, mark):
            encoded[part] += ids
        return encoded

    def _encode_in_order(self, parted: PartedText, mark: str) -> Iterator[PartIds]:
        """Yield the ids of a text in order: control tokens, and the pieces of text between them."""
        begin = 0  # end of the last control token
        before: Neighbor | None = None
        for token in self._control_tokens(parted, mark):
            part = parted.part_of(token.name_begin)
            part_begin = parted.begin_of(part)
            # The ids of a part do not depend on later parts. Therefore, a token absorbs white space only within its part, and
            # is a neighbor of the text before it only if this text is empty or ends within the same part.
            token_begin = max(token.begin, part_begin)
            neighbor = self._plain.neighbor(parted.text[token_begin : token.end], token.id)
            is_empty = token_begin == begin
            ends_in_part = token_begin > part_begin
            after = neighbor if is_empty or ends_in_part else None

            yield from self._encode_between(parted, TextBetween(begin, token_begin, before, after), mark)
            yield PartIds(part, [token.id])
            begin = token.end
            before = neighbor

        yield from self._encode_between(parted, TextBetween(begin, len(parted.text), before, None), mark)

    def _control_tokens(self, parted: PartedText, mark: str) -> list[TokenMatch]:
        """Find the control tokens of a text in parts."""
        if not self.control.has_single_words:
            return unmarked(self.control, parted.text, mark)

        # Some tokens are found only as separate words. The end of a part ends a word, because the ids of a part do not depend
        # on later parts. Therefore, the tokens of each part are found in the text that ends with the part.
        tokens = []
        for begin, end in pairwise([0, *parted.ends]):
            found = unmarked(self.control, parted.text[:end], mark)
            tokens += [token for token in found if token.name_begin >= begin]
        return tokens

    def _encode_between(self, parted: PartedText, between: TextBetween, mark: str) -> Iterator[PartIds]:
        """Yield the ids of the pieces of a text between two control tokens."""
        bounds = parted.bounds(between.begin, between.end)
        pieces = [parted.text[begin:end] for begin, end in pairwise(bounds)]
        if mark:
            pieces = [piece.replace(mark, "") for piece in pieces]
        encoded = self._encode_pieces(pieces, between.before, between.after)
        for begin, ids in zip(bounds[:-1], encoded, strict=True):
            if ids:  # an empty piece may be at the end of the text, after the last part
                yield PartIds(parted.part_of(begin), ids)

    def _encode_pieces(self, pieces: Sequence[str], before: Neighbor | None, after: Neighbor | None) -> list[list[int]]:
        """Encode the pieces of a text between two control tokens; None: no token.

        The ids of a piece are the ids that it adds to the earlier pieces. They do not depend on later pieces, so the text is
        encoded again up to the end of each piece. There are few pieces between two control tokens; without control tokens,
        the time is quadratic in the number of parts.
        """
        encoded = list[list[int]]()
        earlier = list[int]()  # ids of the earlier pieces
        for n, piece in enumerate(pieces, 1):
            is_last = n == len(pieces)
            joined = self._plain.encode_between("".join(pieces[:n]), before, after if is_last else None)
            if joined[: len(earlier)] == earlier:
                ids = joined[len(earlier) :]
            else:  # a token would extend over two pieces
                ids = self._encode_after(earlier, piece, joined)
            self._check_text(piece, ids)
            encoded.append(ids)
            earlier += ids
        return encoded

    def _encode_after(self, earlier: list[int], piece: str, joined: list[int]) -> list[int]:
        """Encode a piece separately from the earlier text, without the space that some tokenizers prepend to a text.

        Args:
            earlier: ids of the earlier text.
            piece: text to encode.
            joined: ids of both texts together; one of them extends over the end of the earlier text.
        """
        decode = self.tokenizer.decode
        # The text that the ids must decode to, as it is, or as a normalizer changes it, for example without line breaks.
        wanted = (decode(earlier) + piece, decode(joined))
        alone = self._plain.encode_continuing(piece)
        for ids in [alone, *self._after_anchors(piece)]:
            if decode(earlier + ids) in wanted:
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
