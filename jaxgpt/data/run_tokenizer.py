"""The tokenizer of a run: a given tokenizer, the tokenizer of a prepared directory, or a new one (`data.tokenizer`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxgpt.config import Config, DataConfig
from jaxgpt.data.builtin import SHAKESPEARE_CHARACTERS
from jaxgpt.data.chat.files import check_records
from jaxgpt.data.chat.records import CONVERSATIONS
from jaxgpt.data.prepared.shards import prepared_tokenizer
from jaxgpt.data.source_kinds import kind_of
from jaxgpt.data.text import read_text
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import with_bos
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data_files import located, tokenizer_place
from jaxgpt.data_settings import FROM_TEXT
from jaxgpt.errors import UserError


def vocab_size(config: Config) -> int:
    """Return the model's vocabulary size. Shakespeare with the char tokenizer needs no download.

    Raises:
        UserError: if the tokenizer that determines the size cannot be made.
    """
    data = config.data
    if config.model.vocab_size:
        return config.model.vocab_size
    if not (data.path or data.mix) and (data.dataset, data.tokenizer) == ("shakespeare", "char"):
        return SHAKESPEARE_CHARACTERS
    return run_tokenizer(config).vocab_size


def run_tokenizer(config: Config, given: Tokenizer | None = None) -> Tokenizer:
    """Return `given`, otherwise the tokenizer of a prepared directory, otherwise a new tokenizer (`data.tokenizer`).

    `given` keeps its rule for the beginning-of-text token; the tokenizer of a new run follows `data.bos`.
    """
    data = config.data
    if given and data.mix:
        return given  # compared with the tokenizer of each source when the source is opened

    sources = [located(source, config.directory) for source in data.sources]
    for source in sources:
        prepared = prepared_tokenizer(Path(source.path), given) if source.path else None
        if prepared:
            return prepared if given else with_bos(prepared, data.bos)
    if given:
        return given

    texts = _texts(config, sources) if data.tokenizer in FROM_TEXT else []
    made = make_tokenizer(tokenizer_place(config), texts, data.vocab_size, config.model.vocab_size)
    return with_bos(made, data.bos)


def _texts(config: Config, sources: Sequence[DataConfig]) -> list[str]:
    """Read the texts to make a tokenizer from; raise `UserError` if a source is not a text."""
    texts = []
    for source in sources:
        kind = kind_of(config, source)
        if kind == "conversations":
            # Raise a more specific error for invalid records.
            check_records(Path(source.path), CONVERSATIONS, source.on_error)
        if kind != "text":
            raise UserError(
                f"{source.path} holds {kind}, not text: choose their tokenizer with --data.tokenizer (gpt2, ids or PATH), "
                "start from a model with --init-from RUN, or tokenize documents with jaxgpt data prepare"
            )
        texts.append(read_text(source).text)
    return texts
