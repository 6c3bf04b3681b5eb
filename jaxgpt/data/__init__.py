"""Text -> ids -> windows -> the batch of a step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.config import Config, UserError
from jaxgpt.data.batches import Windows, eval_batch, eval_windows
from jaxgpt.data.corpus import KNOWN_VOCAB, Progress, Text, no_progress, read_text
from jaxgpt.data.encoded import encode_text
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from jaxgpt.data.tokens import Tokens, is_token_path, open_splits

__all__ = [
    "Dataset",
    "Tokenizer",
    "Tokens",
    "Windows",
    "eval_batch",
    "eval_windows",
    "known_vocab_size",
    "load_dataset",
]
__all__ += ["load_tokenizer"]


@dataclass(frozen=True)
class Dataset:
    """What a run trains and is evaluated on.

    Attributes:
        train: ids for training.
        val: ids for evaluation; the training ids themselves where nothing was held out.
        held_out: whether val was held out.
        tokenizer: between text and ids.
        source: a line that says where it all came from.
        characters: of the text; 0 for token files.
        fingerprint: SHA-256 of the text in UTF-8, or `Tokens.fingerprint` of token files, in hexadecimal: a different
            value means different data.
    """

    train: Tokens
    val: Tokens
    held_out: bool
    tokenizer: Tokenizer
    source: str
    characters: int
    fingerprint: str = ""

    def facts(self) -> dict[str, object]:
        """What another process that reads the same data finds as well: lengths, both ends of each split, the tokenizer."""
        splits = {"training": self.train, "validation": self.val}
        ends = {
            f"{what} ids {where}": tokens.take(start, min(8, len(tokens))).tolist()
            for what, tokens in splits.items()
            for where, start in (("begin with", 0), ("end with", max(len(tokens) - 8, 0)))
        }
        lengths = {f"number of {what} ids": len(tokens) for what, tokens in splits.items()}
        digest = hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()
        return lengths | {"the tokenizer's sha256": digest} | ends


def load_dataset(config: Config, tokenizer: Tokenizer | None = None, progress: Progress = no_progress) -> Dataset:
    """Read, tokenize and split what `config.data` names.

    Args:
        config: the run.
        tokenizer: one that exists already (a resumed run's); None: made as the config says.
        progress: called with the bytes of a text that have been tokenized, and those that there are.

    Raises:
        UserError: there is no such data, or the model's vocabulary is too small for it or for the ids in it.
    """
    data, path = config.data, Path(config.data.path)
    characters = 0
    if data.path and is_token_path(path):
        train, val, source = open_splits(path, data.train_fraction)
        fingerprint = Tokens([*train.parts, *val.parts]).fingerprint()
        if tokenizer is None:
            if data.tokenizer in ("char", "word", "bpe"):
                raise UserError(
                    f"{path} holds ids, not text: name their tokenizer (--data.tokenizer gpt2, ids or PATH)"
                )
            tokenizer = make_tokenizer(data.tokenizer, "", data.vocab_size, config.model.vocab_size)
    else:
        text = read_text(data)
        if tokenizer is None:
            tokenizer = make_tokenizer(data.tokenizer, text, data.vocab_size, config.model.vocab_size, progress)
        ids = encode_text(tokenizer, text, progress).tokens
        train, val = ids.split(int(data.train_fraction * len(ids)))
        source, characters = text.source, text.characters
        fingerprint = text.sha256
    if 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            f"leave it at 0, or raise it"
        )
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    train, val = train.below(vocab_size), val.below(vocab_size)
    held_out = len(val) > 0
    val = val if held_out else train
    if len(val) <= config.model.block_size:
        raise UserError(
            f"model.block_size {config.model.block_size} needs at least {config.model.block_size + 1} ids for "
            f"validation, there are {len(val)}: lower it, or data.train_fraction, or give more text"
        )
    return Dataset(train, val, held_out, tokenizer, source, characters, fingerprint)


def known_vocab_size(config: Config) -> int:
    """The vocabulary that a config's model will have, without downloading anything.

    Raises:
        UserError: only the text could tell, and it is not at hand.
    """
    if config.model.vocab_size:
        return config.model.vocab_size
    if not config.data.path and config.data.dataset in KNOWN_VOCAB:
        return KNOWN_VOCAB[config.data.dataset]
    text = Text(b"", "") if config.data.tokenizer in ("byte", "gpt2") else read_text(config.data)
    return make_tokenizer(config.data.tokenizer, text, config.data.vocab_size, 0).vocab_size
