"""Data: text -> token ids -> windows -> the batch of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxgpt.config import Config, UserError
from jaxgpt.data.batches import Batches, Windows
from jaxgpt.data.conversations import load_conversations
from jaxgpt.data.corpus import KNOWN_VOCAB, Progress, Text, no_progress, read_text
from jaxgpt.data.encoded import count_bytes, encode_text
from jaxgpt.data.mixture import Mixture
from jaxgpt.data.packing import Packed, pack_documents
from jaxgpt.data.shards import find_prepared, holds_ids, prepared_tokenizer
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from jaxgpt.data.tokens import Tokens, open_splits, with_documents

__all__ = [
    "Batches",
    "Dataset",
    "EvalData",
    "Mixture",
    "Packed",
    "Tokenizer",
    "Tokens",
    "Windows",
    "known_vocab_size",
    "load_dataset",
    "load_eval_data",
]
__all__ += ["load_tokenizer", "shared_tokenizer"]


@dataclass(frozen=True)
class Dataset:
    """Training and validation data of a run.

    Attributes:
        train: token ids for training.
        val: token ids for validation; the training ids if nothing was held out.
        held_out: whether `val` was held out.
        tokenizer: the tokenizer of the ids.
        source: one-line description of where the data came from.
        characters: number of characters of the text; 0 for token files and conversations.
        fingerprint: SHA-256 of the text in UTF-8 or of the file of conversations, or `Tokens.fingerprint` of token files, in
            hexadecimal; of a mixture, the SHA-256 of the fingerprints of its sources.
    """

    train: Tokens | Packed | Mixture
    val: Tokens | Packed | Mixture
    held_out: bool
    tokenizer: Tokenizer
    source: str
    characters: int
    fingerprint: str = ""

    def facts(self) -> dict[str, object]:
        """Return facts that must be equal in all processes: lengths, first and last ids of each split, and the tokenizer."""
        splits = {"training": self.train, "validation": self.val}
        ends = {
            f"the {where} of the {split} ids": tokens.take(start, min(8, len(tokens))).tolist()
            for split, tokens in splits.items()
            for where, start in (("start", 0), ("end", max(len(tokens) - 8, 0)))
        }
        lengths = {f"the number of {split} ids": len(tokens) for split, tokens in splits.items()}
        digest = hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()
        return lengths | {"the SHA-256 of the tokenizer": digest} | ends


@dataclass(frozen=True)
class EvalData:
    """Data to evaluate a model on.

    Attributes:
        tokens: token ids.
        source: one-line description of the data and the split.
        text_bytes: length of the text in UTF-8 bytes; 0 if unknown.
        held_out: whether they are a validation split.
    """

    tokens: Tokens | Packed | Mixture
    source: str
    text_bytes: int
    held_out: bool


def load_dataset(config: Config, tokenizer: Tokenizer | None = None, progress: Progress = no_progress) -> Dataset:
    """Read, tokenize and split the data of a run.

    Args:
        config: the config of the run.
        tokenizer: an existing tokenizer, such as that of a resumed run; None: make the one of `config.data`.
        progress: called with the number of bytes tokenized so far and the total.

    Raises:
        UserError: the data cannot be read, or has ids beyond the model's vocabulary.
    """
    data, path = config.data, Path(config.data.path)
    if data.mix:
        return _load_mixture(config, tokenizer or shared_tokenizer(config, progress), progress)
    if data.conversations:
        tokenizer = tokenizer or _existing(
            config, "conversations, not text: start from a model with --init-from RUN, or"
        )
        _vocab_size(config, tokenizer)
        packed, rest, source, sha256 = load_conversations(
            path, tokenizer, config.model.block_size, data.train_fraction, progress
        )
        return Dataset(packed, rest if len(rest) else packed, len(rest) > 0, tokenizer, source, 0, sha256)
    characters = 0
    if data.path and holds_ids(path):
        tokenizer = prepared_tokenizer(path, data.tokenizer, tokenizer) or tokenizer
        train, val, source = open_splits(path, data.train_fraction)
        fingerprint = ""
        tokenizer = tokenizer or _existing(config, "token ids, not text:")
    else:
        text = read_text(data)
        if tokenizer is None:
            tokenizer = make_tokenizer(data.tokenizer, text, data.vocab_size, config.model.vocab_size, progress)
        ids = encode_text(tokenizer, text, progress).tokens
        train, val = ids.split(int(data.train_fraction * len(ids)))
        source, characters = text.source, text.characters
        fingerprint = text.sha256
    vocab_size = _vocab_size(config, tokenizer)
    train, val = (ids.below(vocab_size, tokenizer.vocab_size) for ids in (train, val))
    fingerprint = fingerprint or Tokens([*train.parts, *val.parts], vocab_size).fingerprint()
    if data.documents != "flow":
        train = with_documents(train, tokenizer.end_ids, data.documents)
        val = Tokens(val.parts, vocab_size, tokenizer.end_ids)
    held_out = len(val) > 0
    val = val if held_out else train
    T = config.model.block_size
    if len(val) <= T:
        where = f" in {data.path}" if data.path else ""
        raise UserError(
            f"model.block_size {T} needs at least {T + 1} validation tokens, but there are {len(val)}{where}: "
            f"lower it, lower data.train_fraction, or use a longer text"
        )
    if data.documents != "pack":
        return Dataset(train, val, held_out, tokenizer, source, characters, fingerprint)
    packed = pack_documents(train, T)
    rest = pack_documents(val, T) if held_out else packed
    source += f"; {packed.documents:,} documents, windows {packed.fill(T):.1%} full"
    return Dataset(packed, rest, held_out, tokenizer, source, characters, fingerprint)


def _load_mixture(config: Config, tokenizer: Tokenizer, progress: Progress) -> Dataset:
    """Read, tokenize and split each source of a mixture.

    The validation data are those of all sources, whole, so that runs with other weights have comparable losses.
    """
    sources = config.data.sources
    found = [load_dataset(replace(config, data=each), tokenizer, progress) for each, _ in sources]
    weights = [weight for _, weight in sources]
    held_out = any(each.held_out for each in found)
    val = [each.val for each in found if each.held_out or not held_out]
    digest = hashlib.sha256("\n".join(each.fingerprint for each in found).encode())
    return Dataset(
        _mixture([each.train for each in found], weights),
        _mixture(val, [1] * len(val)),
        held_out,
        tokenizer,
        "; ".join(f"{weight / sum(weights):.1%} {each.source}" for each, weight in zip(found, weights, strict=True)),
        sum(each.characters for each in found) if all(each.characters for each in found) else 0,
        digest.hexdigest(),
    )


def _mixture(sources: Sequence[Tokens | Packed | Mixture], weights: Sequence[int]) -> Mixture:
    plain = [each for each in sources if not isinstance(each, Mixture)]  # mixtures have no mixtures
    if len({each.segmented for each in plain}) > 1:
        raise UserError("data.mix has conversations and other data: add --data.documents mask")
    return Mixture(plain, weights)


def shared_tokenizer(config: Config, progress: Progress = no_progress) -> Tokenizer:
    """Make the tokenizer of a mixture: that of a prepared source, or of the text of all sources if it is made from text.

    Raises:
        UserError: it is made from text, and a source is not text; or it cannot be made.
    """
    data, texts = config.data, list[Text]()
    for each, _ in data.sources:
        if tokenizer := prepared_tokenizer(Path(each.path), data.tokenizer):
            return tokenizer
    if data.tokenizer in ("char", "word", "bpe"):
        for each, _ in data.sources:
            if each.conversations or holds_ids(Path(each.path)):
                _existing(
                    replace(config, data=each), f"{'conversations' if each.conversations else 'token ids'}, not text:"
                )
            texts.append(read_text(each))
    return make_tokenizer(data.tokenizer, texts, data.vocab_size, config.model.vocab_size, progress)


def load_eval_data(config: Config, tokenizer: Tokenizer, path: str = "", progress: Progress = no_progress) -> EvalData:
    """Read and tokenize the data to evaluate a model on.

    Args:
        config: the config of the run.
        tokenizer: the tokenizer of the run.
        path: text or token files to use instead of the run's data: all of it, or the validation files if a folder of token
            files has any. Empty: the validation split of the run, or its training text if nothing was held out.
        progress: as in `load_dataset`.

    Raises:
        UserError: the data cannot be read, has fewer than two ids, or has ids beyond the vocabulary.
    """
    data = replace(config.data, path=path, mix=(), train_fraction=1.0) if path else config.data
    if data.mix:
        found = [load_eval_data(replace(config, data=each), tokenizer, "", progress) for each, _ in data.sources]
        held_out = any(each.held_out for each in found)
        found = [each for each in found if each.held_out or not held_out]
        known = all(each.text_bytes for each in found)
        return EvalData(
            _mixture([each.tokens for each in found], [1] * len(found)),
            "; ".join(each.source for each in found),
            sum(each.text_bytes for each in found) if known else 0,
            held_out,
        )
    text_bytes, vocab_size = 0, _vocab_size(config, tokenizer)
    if data.conversations:
        T = config.model.block_size
        packed, rest, source, _ = load_conversations(Path(data.path), tokenizer, T, data.train_fraction, progress)
        split = "validation split" if len(rest) else "all" if path else "training text"
        return EvalData(rest if len(rest) else packed, f"{source} ({split})", 0, len(rest) > 0)
    if data.path and holds_ids(Path(data.path)):
        prepared_tokenizer(Path(data.path), data.tokenizer, tokenizer)  # must be the same
        train, val, source = open_splits(Path(data.path), data.train_fraction)
        chosen = (val if len(val) else train).below(vocab_size, tokenizer.vocab_size)
        text_bytes = _decoded_bytes(tokenizer, chosen)
    else:
        text = read_text(data)
        encoded = encode_text(tokenizer, text, progress)
        train, val = encoded.tokens.split(int(data.train_fraction * len(encoded.tokens)))
        chosen = (val if len(val) else train).below(vocab_size, tokenizer.vocab_size)
        text_bytes, source = count_bytes(tokenizer, text, encoded, len(train) if len(val) else 0), text.source
    split = "validation split" if len(val) else "all" if path else "training text"
    if len(chosen) < 2:
        raise UserError(f"{source} ({split}) has {len(chosen)} token(s), too few to evaluate on: use a longer text")
    if data.documents != "flow":
        chosen = Tokens(chosen.parts, vocab_size, tokenizer.end_ids)
    tokens = pack_documents(chosen, config.model.block_size) if data.documents == "pack" else chosen
    return EvalData(tokens, f"{source} ({split})", text_bytes, len(val) > 0)


def _existing(config: Config, holds: str) -> Tokenizer:
    """Make a tokenizer that needs no text.

    Raises:
        UserError: the config names another kind.
    """
    data = config.data
    if data.tokenizer in ("char", "word", "bpe"):
        documents = f"; documents with a text field need jaxgpt data prepare {data.path}" if data.conversations else ""
        raise UserError(
            f"{data.path} holds {holds} choose their tokenizer with --data.tokenizer (gpt2, ids or PATH){documents}"
        )
    return make_tokenizer(data.tokenizer, "", data.vocab_size, config.model.vocab_size)


def _vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """Return the vocabulary size of the model.

    Raises:
        UserError: it is smaller than the tokenizer's.
    """
    if 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            f"set it to 0, or raise it"
        )
    return config.model.vocab_size or tokenizer.vocab_size


def _decoded_bytes(tokenizer: Tokenizer, tokens: Tokens) -> int:
    """Count the UTF-8 bytes of decoded ids without end tokens; 0 if the tokenizer does not preserve white space."""
    if tokenizer.separator:
        return 0
    total = 0
    for start in range(0, len(tokens), 1 << 18):
        ids = tokens.take(start, min(1 << 18, len(tokens) - start))
        total += len(tokenizer.decode(ids[ids != tokenizer.eos_id]).encode())
    return total


def known_vocab_size(config: Config) -> int:
    """Return the vocabulary size of a config's model without downloading its dataset.

    Raises:
        UserError: the size depends on a text that cannot be read.
    """
    if config.model.vocab_size:
        return config.model.vocab_size
    if not config.data.path and config.data.dataset in KNOWN_VOCAB:
        return KNOWN_VOCAB[config.data.dataset]
    if config.data.mix:
        return shared_tokenizer(config).vocab_size
    if config.data.path and (prepared := find_prepared(Path(config.data.path))):
        return prepared.vocab_size
    text = Text(b"", "") if config.data.tokenizer in ("byte", "gpt2") else read_text(config.data)
    return make_tokenizer(config.data.tokenizer, text, config.data.vocab_size, 0).vocab_size
