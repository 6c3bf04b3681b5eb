"""Train byte-level BPE tokenizers in bounded time and memory on any text.

The time to merge the pairs of a word grows with its length, and the memory grows with the distinct words. Therefore, words are
cut at `WORD` bytes, and the text is shortened until its distinct words have at most `DISTINCT` bytes. Usual text is below both
limits: the distinct words of 130 MB of source code have 1.8 MB.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxgpt.data.byte_level import byte_level_bpe
from jaxgpt.data.subword import SubwordTokenizer
from jaxgpt.data.tokenizer import EOS_NAMES
from jaxgpt.errors import UserError

WORD = 1000  # bytes after which a word is cut for training
DISTINCT = 8_000_000  # bytes of distinct words to train on; training takes about 0.1 GB of memory per 1 MB of them
# Approximation of the words of GPT-2's pattern: runs of letters, of digits, or of other characters.
WORDS = re.compile(rf"[^\W\d_]{{1,{WORD}}}|\d{{1,{WORD}}}|(?:[^\w\s]|_){{1,{WORD}}}")

Sample = Callable[
    [int], Iterable[Sequence[str]]
]  # function of a number of bytes: returns about as much text, in pieces


def train_bpe(texts: Iterable[Sequence[str]] | Sample, vocab_size: int, size: int = 0) -> SubwordTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; minimum 257: all bytes and end-of-text.

    Args:
        texts: texts in pieces, or a function that returns about `size` bytes of text. The function is called with a smaller
            size if the text has too many distinct words.
        vocab_size: maximum number of tokens.
        size: bytes of text to request if `texts` is a function.

    Raises:
        UserError: if `vocab_size` is below 257.
    """
    if vocab_size < 257:
        raise UserError(f"data.vocab_size {vocab_size} is too small: bytes and the end-of-text token need 257 ids")
    if callable(texts):
        while size > DISTINCT and _distinct(texts(size)) > DISTINCT:
            size //= 2
        texts = texts(size)
    return SubwordTokenizer(_interruptible(texts, vocab_size))


def _distinct(texts: Iterable[Sequence[str]]) -> int:
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


def _interruptible(texts: Iterable[Sequence[str]], vocab_size: int) -> Any:
    """Train in a thread, so that Ctrl-C ends the command: the library itself does not handle signals."""
    trained = []
    errors = list[BaseException]()
    is_stopped = threading.Event()

    def until_stopped() -> Iterator[Sequence[str]]:
        for each in texts:
            if is_stopped.is_set():
                return
            yield each

    def run() -> None:
        try:
            trained.append(_train(until_stopped(), vocab_size))
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        is_stopped.set()
        raise
    if errors:
        raise errors[0]
    return trained[0]


def _train(texts: Iterator[Sequence[str]], vocab_size: int) -> Any:
    """Train with the library; cut long words only for training."""
    from tokenizers import pre_tokenizers, trainers

    tokenizer = byte_level_bpe({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_NAMES[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(WORD)])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return tokenizer
