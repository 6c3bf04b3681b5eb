"""Train byte-level BPE tokenizers in bounded time and memory on any text.

The time to merge the pairs of a word grows with its length, and the memory grows with the distinct words. Therefore, words are
cut at `WORD` bytes, and the text is shortened until its distinct words have at most `DISTINCT` bytes. Usual text is below both
limits: the distinct words of 130 MB of source code have 1.8 MB.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from jaxgpt.data.tokenizers.base import END_OF_TEXT
from jaxgpt.data.tokenizers.byte_level import byte_level_bpe
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

WORD = 1000  # bytes after which a word is cut for training
DISTINCT = 8_000_000  # maximum bytes of distinct words to train on; training takes about 0.1 GB of memory per MB
# Approximation of the words of GPT-2's pattern: runs of letters, of digits, or of other characters.
WORDS = re.compile(rf"[^\W\d_]{{1,{WORD}}}|\d{{1,{WORD}}}|(?:[^\w\s]|_){{1,{WORD}}}")

# Function of a number of bytes that returns texts of about this size in total, each text in pieces.
Sample = Callable[[int], Iterable[Sequence[str]]]


def train_bpe(texts: Iterable[Sequence[str]], vocab_size: int) -> SubwordTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; minimum 257: all bytes and end-of-text.

    Args:
        texts: texts in pieces.
        vocab_size: maximum number of tokens.

    Raises:
        UserError: if `vocab_size` is below 257.
    """
    _check_size(vocab_size)
    return SubwordTokenizer(_train_interruptibly(texts, vocab_size))


def train_bpe_on_sample(sample: Sample, vocab_size: int, size: int) -> SubwordTokenizer:
    """Train as `train_bpe` on about `size` bytes, halved while their distinct words have more than `DISTINCT` bytes."""
    _check_size(vocab_size)
    while size > DISTINCT and _distinct_bytes(sample(size)) > DISTINCT:
        size //= 2
    return train_bpe(sample(size), vocab_size)


def _check_size(vocab_size: int) -> None:
    """Raise `UserError` if the vocabulary is too small for all bytes and the end-of-text token."""
    if vocab_size < 257:
        raise UserError(
            f"data.vocab_size {vocab_size} is too small: bytes and the end-of-text token need 257 ids; raise it"
        )


def _distinct_bytes(texts: Iterable[Sequence[str]]) -> int:
    """Count the bytes of distinct words; stop above `DISTINCT`."""
    seen = set[str]()
    total = 0
    for pieces in texts:
        for piece in pieces:
            new = set(WORDS.findall(piece)) - seen
            seen |= new
            total += sum(len(word.encode()) for word in new)
        if total > DISTINCT:
            break
    return total


def _train_interruptibly(texts: Iterable[Sequence[str]], vocab_size: int) -> Any:
    """Train in a thread, so that Ctrl-C ends the command: the library itself does not handle signals."""
    is_stopped = threading.Event()
    trained = Future[Any]()

    def until_stopped() -> Iterator[Sequence[str]]:
        for pieces in texts:
            if is_stopped.is_set():
                return
            yield pieces

    def run() -> None:
        try:
            trained.set_result(_train(until_stopped(), vocab_size))
        except BaseException as e:
            trained.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        return trained.result()
    except KeyboardInterrupt:
        is_stopped.set()
        raise


def _train(texts: Iterator[Sequence[str]], vocab_size: int) -> Any:
    """Train with the library; cut long words only for training."""
    from tokenizers import pre_tokenizers, trainers

    library = byte_level_bpe({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    word_splitter = library.pre_tokenizer
    library.pre_tokenizer = pre_tokenizers.Sequence([word_splitter, pre_tokenizers.FixedLength(WORD)])
    library.train_from_iterator(texts, trainer)
    library.pre_tokenizer = word_splitter
    return library
