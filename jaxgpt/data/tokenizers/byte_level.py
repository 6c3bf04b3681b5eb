"""GPT-2's byte-level BPE, with a printable character for each byte, and names for the bytes of incomplete characters."""

from __future__ import annotations

from typing import Any


def _byte_vocab() -> dict[str, int]:
    """Map characters to bytes: visible Latin-1 characters to their code points, characters above Latin-1 to the other bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible}
    characters |= {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return {characters[byte]: byte for byte in range(256)}


BYTE_VOCAB = _byte_vocab()  # map from GPT-2's character for a byte to the value of the byte


def byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Build a byte-level BPE of the `tokenizers` library, which splits text into words by GPT-2's pattern."""
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    library = LibraryTokenizer(models.BPE(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return library


def text_with_byte_names(data: bytes) -> str:
    """Return the text of UTF-8 bytes, with a name such as `<0xC3>` for each byte of an incomplete character."""
    text = data.decode("utf-8", "surrogateescape")
    # A byte of an incomplete character became a surrogate, U+DC80 to U+DCFF, which UTF-8 text cannot contain.
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)
