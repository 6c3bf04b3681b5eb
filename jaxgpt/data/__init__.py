"""Text -> ids -> windows -> the batch of a step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from jaxgpt.config import Config, UserError
from jaxgpt.data.batches import Windows, eval_batch, eval_windows
from jaxgpt.data.corpus import KNOWN_VOCAB, Progress, Text, no_progress, read_text
from jaxgpt.data.encoded import count_bytes, encode_text
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from jaxgpt.data.tokens import Tokens, is_token_path, open_splits

__all__ = [
    "Dataset",
    "EvalData",
    "Tokenizer",
    "Tokens",
    "Windows",
    "eval_batch",
    "eval_windows",
    "known_vocab_size",
    "load_dataset",
    "load_eval_data",
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


@dataclass(frozen=True)
class EvalData:
    """What a model is evaluated on.

    Attributes:
        tokens: the ids.
        source: a line that says what was read, and which part of it counts.
        text_bytes: bytes of their text in UTF-8; 0 where the text is not known.
    """

    tokens: Tokens
    source: str
    text_bytes: int


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
        fingerprint = ""
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
    vocab_size = _vocab_size(config, tokenizer)
    train, val = train.below(vocab_size), val.below(vocab_size)
    fingerprint = fingerprint or Tokens([*train.parts, *val.parts], vocab_size).fingerprint()
    held_out = len(val) > 0
    val = val if held_out else train
    if len(val) <= config.model.block_size:
        raise UserError(
            f"model.block_size {config.model.block_size} needs at least {config.model.block_size + 1} ids for "
            f"validation, there are {len(val)}: lower it, or data.train_fraction, or give more text"
        )
    return Dataset(train, val, held_out, tokenizer, source, characters, fingerprint)


def load_eval_data(config: Config, tokenizer: Tokenizer, path: str = "", progress: Progress = no_progress) -> EvalData:
    """Read and tokenize what a model is evaluated on.

    Args:
        config: of the run.
        tokenizer: of the run.
        path: another text, or token files: all of it, or the validation files of a folder of token files that has some.
            Empty: the validation split of the run, or its training text if it held out nothing.
        progress: as of `load_dataset`.

    Raises:
        UserError: there is no such data, fewer than two ids, or one beyond the vocabulary.
    """
    data = replace(config.data, path=path, train_fraction=1.0) if path else config.data
    text_bytes, vocab_size = 0, _vocab_size(config, tokenizer)
    if data.path and is_token_path(Path(data.path)):
        train, val, source = open_splits(Path(data.path), data.train_fraction)
        chosen = (val if len(val) else train).below(vocab_size)
        text_bytes = _decoded_bytes(tokenizer, chosen)
    else:
        text = read_text(data)
        encoded = encode_text(tokenizer, text, progress)
        train, val = encoded.tokens.split(int(data.train_fraction * len(encoded.tokens)))
        chosen = (val if len(val) else train).below(vocab_size)
        text_bytes, source = count_bytes(tokenizer, text, encoded, len(train) if len(val) else 0), text.source
    split = "validation split" if len(val) else "all" if path else "training text"
    if len(chosen) < 2:
        raise UserError(f"{source} ({split}): {len(chosen)} token(s) are too few to evaluate on; give a longer text")
    return EvalData(chosen, f"{source} ({split})", text_bytes)


def _vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """The number of ids that a model takes.

    Raises:
        UserError: the tokenizer has more.
    """
    if 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            f"leave it at 0, or raise it"
        )
    return config.model.vocab_size or tokenizer.vocab_size


def _decoded_bytes(tokenizer: Tokenizer, tokens: Tokens) -> int:
    """Count the bytes of the text that ids stand for, without end tokens; 0 if the tokenizer does not keep white space."""
    if tokenizer.glue:
        return 0
    total = 0
    for start in range(0, len(tokens), 1 << 18):
        ids = tokens.take(start, min(1 << 18, len(tokens) - start))
        total += len(tokenizer.decode(ids[ids != tokenizer.eos_id]).encode())
    return total


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
