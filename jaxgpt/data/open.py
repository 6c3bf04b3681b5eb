"""Open the data of a config: a source of text, token files, conversations, preference pairs or prompts, or a mixture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxgpt.config import Config
from jaxgpt.data.mixed_sources import check_spellings, mixed
from jaxgpt.data.opened import Data, Recorded
from jaxgpt.data.opened_source import open_source
from jaxgpt.data.packing import Packed
from jaxgpt.data.prepared.sources import file_digests
from jaxgpt.data.run_tokenizer import run_tokenizer
from jaxgpt.data.source_kinds import kind_of
from jaxgpt.data.text import NO_TEXT
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokens import Split
from jaxgpt.data_files import located
from jaxgpt.errors import UserError
from jaxgpt.progress import NO_PROGRESS, Progress


def open_data(
    config: Config, tokenizer: Tokenizer | None = None, progress: Progress = NO_PROGRESS, tokens: int = 0
) -> Data:
    """Read, tokenize and split the data of a config.

    Args:
        config: config of a run or preset; uses `data`, `post`, `directory`, `model.vocab_size` and `window`.
        tokenizer: tokenizer of an existing run; None: the tokenizer of a prepared directory, or `data.tokenizer`.
        progress: called with (done, total), in characters of a text or bytes of records.
        tokens: number of training tokens so far; the sources of mixtures that have ended are not opened.

    Raises:
        UserError: if the data cannot be read, is too short, or does not fit `config.data` or `model.vocab_size`.
    """
    data = config.data
    if data.dataset == "none" and not (data.path or data.mix) and config.post.objective == "next-token":
        raise UserError(NO_TEXT)
    tokenizer = run_tokenizer(config, tokenizer)
    if 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            "set it to 0, or raise it"
        )
    if data.mix:
        return _open_mixture(config, tokenizer, progress, tokens)
    return _open_single(config, tokenizer, progress)


def with_path(config: Config, path: str) -> Config:
    """Return a config for evaluation on `path`: its validation files, if any, or all its data.

    If `path` is empty, the run's own data are evaluated; of several mixtures, only the last.
    """
    if not path:
        return replace(config, data=config.data.with_last_mixture())
    return replace(config, data=replace(config.data, path=path, mix=(), train_fraction=1.0), directory="")


def _open_mixture(config: Config, tokenizer: Tokenizer, progress: Progress, tokens: int) -> Data:
    """Open the sources of the mixtures that have not ended after a number of training tokens."""
    check_spellings(config.data.mix)
    parts = {}
    for each in config.data.remaining_sources(tokens):
        parts[each.path] = open_data(replace(config, data=each), tokenizer, progress)  # also compares the tokenizers
    return mixed(config.data, parts)


def _open_single(config: Config, tokenizer: Tokenizer, progress: Progress) -> Data:
    """Open the data of a config without mixtures."""
    name = config.data.path or config.data.dataset  # path as given, before it is located
    data = located(config.data, config.directory)
    config = replace(config, data=data)
    kind = kind_of(config, data)
    opened = open_source(kind, config, tokenizer, progress)

    # Without held-out data, the training data are evaluated.
    held_out = len(opened.val) > 0
    val = opened.val if held_out else opened.train
    _check_evaluated(val, config.window, opened.source)
    digests = file_digests(Path(data.path), opened.files) if data.path else {}
    return Data(
        train=opened.train,
        val=val,
        held_out=held_out,
        tokenizer=tokenizer,
        source=opened.source,
        fingerprint=opened.fingerprint,
        kind=kind,
        name=name,
        text=opened.text,
        bos_ids=opened.bos_ids,
        recorded=Recorded(boundary=opened.boundary, files=digests),
    )


def _check_evaluated(val: Split, window: int, source: str) -> None:
    """Raise `UserError` if a split has no evaluation window."""
    if len(val.eval_starts(window, window)):
        return
    if isinstance(val, Packed):
        fix = "use longer documents, or change --data.train-fraction"
        raise UserError(f"no evaluation window: the evaluated documents of {source} have a single id each; {fix}")
    raise UserError(f"too few tokens for evaluation: {len(val)} in {source}; use a longer text")
