"""Tokenize documents into shards of ids, on all cores and in bounded memory.

Documents are a numbered sequence of pieces (`DocumentPiece`). index.json records the number of pieces written, and
the length of each shard at that moment. After an interruption, the shards are truncated to these lengths and encoding continues
with the next piece. The output is the same as without the interruption.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from jaxgpt.config import PrepareParams
from jaxgpt.cpu import cores
from jaxgpt.data.prepared.document_piece import DocumentPiece, is_short
from jaxgpt.data.prepared.documents import beginning, check_first, read_pieces, sample_text
from jaxgpt.data.prepared.dropped import Repeats, count_skipped
from jaxgpt.data.prepared.index import SPLITS, Index, write_index
from jaxgpt.data.prepared.older_outputs import check_older_cuts
from jaxgpt.data.prepared.output import new_output, open_index, set_tokenizer
from jaxgpt.data.prepared.piece_batches import batches_of, encode_in_threads
from jaxgpt.data.prepared.piece_encoder import EncodedPiece, PieceEncoder
from jaxgpt.data.prepared.repeated import repeated_text, structured_text
from jaxgpt.data.prepared.settings import settings_entry
from jaxgpt.data.prepared.shard_writer import ShardWriter
from jaxgpt.data.prepared.shards import check_files, saved_tokenizer, token_dtype
from jaxgpt.data.prepared.sources import Source, find_source
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import document_bos, with_bos
from jaxgpt.data.tokenizers.bpe import train_bpe_on_sample
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data_settings import FROM_TEXT
from jaxgpt.directories import INDEX
from jaxgpt.errors import UserError, plural, short_repr
from jaxgpt.progress import NO_PROGRESS, Progress

BPE_SAMPLE = 200_000_000  # approximate bytes of text for training a BPE tokenizer
SAVE_EVERY = 30.0  # minimum seconds between writes of index.json, unless a shard is completed


def prepare(
    names: Sequence[str],
    out: Path,
    params: PrepareParams,
    progress: Progress = NO_PROGRESS,
    note: Callable[[str], None] = lambda text: None,
) -> Index:
    """Tokenize documents into shards of ids with an index, and return the index.

    A call with the same arguments continues an interrupted call. If the directory is complete, the call compares its files
    with their checksums.

    Args:
        names: files, directories or Hugging Face datasets (`hf:OWNER/NAME[/PATTERN]`).
        out: output directory: new, empty, or from an earlier call with the same parameters.
        params: parameters of the command.
        progress: receives the bytes of the sources read since the call, and the numbers of documents and tokens.
        note: callback for one-line messages to the user.

    Raises:
        UserError: if the sources, parameters or directory cannot be used, or (with `on_error` fail) a document is unreadable.
        OSError: if a file cannot be written.
    """
    if any(Path(name).resolve() == out.resolve() for name in names):
        raise UserError(f"--out {out} is a source: choose a different --out")
    sources = [find_source(name) for name in names]
    for source in sources:
        if source.skipped:
            note(f"{source.name}: skipped {source.skipped}")
    if params.on_error == "fail":
        check_first(sources, params)

    chosen = _choose_tokenizer(params)
    _check_id_width(params, chosen.vocab_size)
    settings = settings_entry(params, sources, chosen.sha256, chosen.bos_ids)

    with new_output(out):
        index = open_index(out, settings, sources, note)
        if index["complete"]:
            check_files(out, index, checksums=True)
            saved_tokenizer(out, index)
            note(f"{out} is complete, and its files match the checksums in {INDEX}")
            return index

        for text in _notes_before(out, index, sources, params):
            note(text)
        if "tokenizer" not in index:
            tokenizer = chosen.tokenizer
            if tokenizer is None:
                tokenizer = _train_tokenizer(sources, params)
            set_tokenizer(out, index, tokenizer, params.tokenizer, chosen.bos_ids)
        _write_remaining(out, index, sources, params, progress)
        if params.separator and not _is_divided(index, sources):
            note(
                f"--separator {short_repr(params.separator)} separates no documents of the sources; a line break is $'\\n' in "
                f"most shells, not '\\n'"
            )
        return index


class _ChosenTokenizer(NamedTuple):
    """The tokenizer that the parameters name, or the properties of the BPE that will be trained."""

    tokenizer: Tokenizer | None  # None: a BPE is trained on the sources
    vocab_size: int  # maximum number of tokens if a BPE is trained
    sha256: str  # SHA-256 of tokenizer.json, without the changes of the parameter `bos`; "": a BPE is trained
    bos_ids: list[int]  # ids before each document


def _choose_tokenizer(params: PrepareParams) -> _ChosenTokenizer:
    """Return the tokenizer of the parameters.

    Raises:
        UserError: if the tokenizer has no end-of-text token, or lacks the beginning-of-text token of `params.bos` yes.
    """
    if params.tokenizer == "bpe":
        if params.bos == "yes":
            raise UserError(
                "--bos yes: a trained bpe has no beginning-of-text token; use --bos auto, or a different tokenizer"
            )
        return _ChosenTokenizer(None, params.vocab_size, sha256="", bos_ids=[])

    original = _named_tokenizer(params.tokenizer)
    tokenizer = with_bos(original, params.bos)
    return _ChosenTokenizer(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        sha256=hashlib.sha256(original.to_json().encode()).hexdigest(),
        bos_ids=list(document_bos(tokenizer)),
    )


def _named_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer with an end-of-text token, by its name; raise `UserError` if it has no such token."""
    needs_data = name in FROM_TEXT or name == "ids"
    tokenizer = None if needs_data else make_tokenizer(name)
    if tokenizer is None or tokenizer.eos_id is None:
        raise UserError(f"the tokenizer {name} has no end-of-text token to separate documents: use gpt2 or bpe")
    return tokenizer


def _train_tokenizer(sources: Sequence[Source], params: PrepareParams) -> Tokenizer:
    """Train a BPE on a sample of the sources."""
    return train_bpe_on_sample(partial(sample_text, sources, params), params.vocab_size, BPE_SAMPLE)


def _check_id_width(params: PrepareParams, vocab_size: int) -> None:
    """Raise `UserError` if the format cannot hold the ids of a vocabulary."""
    if params.format == "nanogpt" and token_dtype(vocab_size).itemsize > 2:
        raise UserError(f"nanoGPT's 16-bit ids cannot hold a vocabulary of {vocab_size:,}: use --format llm.c")


def _notes_before(out: Path, index: Index, sources: Sequence[Source], params: PrepareParams) -> Iterator[str]:
    """Yield notes on repeated documents that are kept, on markup that becomes text, and on a continued command."""
    repeated = repeated_text(sources, partial(beginning, params=params))
    if repeated and params.dedup == "none":
        yield repeated
    structured = structured_text(sources)
    if structured:
        yield structured
    if index["pieces"]:
        documents = sum(index["splits"][split]["documents"] for split in SPLITS)
        yield f"continuing {out} after {plural(documents, 'document')}"


def _write_remaining(
    out: Path, index: Index, sources: Sequence[Source], params: PrepareParams, progress: Progress
) -> None:
    """Read, encode and write the pieces that the index does not count yet, with the saved tokenizer."""
    tokenizer = saved_tokenizer(out, index)
    check_older_cuts(out, index, tokenizer)
    pieces = read_pieces(sources, params, tokenizer.cuts)
    repeats = None if params.dedup == "none" else Repeats()
    _skip_written(islice(pieces, index["pieces"]), repeats, params)

    encoder = PieceEncoder(tokenizer, params, index["settings"].get("bos_ids", []))
    encoded = encode_in_threads(encoder.encode_batch, batches_of(pieces), params.workers or cores())
    total = sum(source.size for source in sources)
    try:
        with closing(encoded):
            _write(out, index, encoded, repeats, progress, total)
    except OSError as e:  # for example, a full disk
        raise OSError(e.errno, e.strerror, e.filename or str(out)) from None


def _is_divided(index: Index, sources: Sequence[Source]) -> bool:
    """Return whether there are more documents than files, including documents that are not written."""
    documents = sum(index["splits"][split]["documents"] for split in SPLITS)
    dropped = index["dropped"]["repeated"] + index["dropped"]["short"] + index["skipped"]["documents"]
    return documents + dropped > sum(len(source.files) for source in sources)


def _skip_written(written: Iterable[DocumentPiece], repeats: Repeats | None, params: PrepareParams) -> None:
    """Read the pieces that an interrupted command has written, and add their documents to `repeats`."""
    if repeats is None:
        deque(written, maxlen=0)
        return
    for piece in written:
        identity = piece.identity
        if piece.is_first and piece.is_last:
            try:
                text = piece.text()
            except UserError:  # skipped by the interrupted command
                continue
            if is_short(piece, text, params):
                continue
            identity = hashlib.sha256(text.encode()).digest()
        repeats.add(piece.is_first, identity)


def _write(
    out: Path,
    index: Index,
    batches: Iterable[list[EncodedPiece]],
    repeats: Repeats | None,
    progress: Progress,
    total: int,
) -> None:
    """Append pieces to the shards of their splits, and record the resume position in the index.

    Args:
        out: output directory.
        index: index of the directory, which is updated.
        batches: encoded pieces.
        repeats: documents seen so far; None: repeated documents are written.
        progress: as in `prepare`.
        total: bytes of all sources.
    """
    with ExitStack() as stack:
        writers = {split: stack.enter_context(closing(ShardWriter(out, index, split))) for split in SPLITS}
        saved = time.monotonic()
        start: int | None = None  # bytes read before an interruption, and in the first batch
        for batch in batches:
            for piece in batch:
                is_complete = _write_piece(piece, writers, index, repeats)
                index["pieces"] += 1
                if is_complete or time.monotonic() - saved > SAVE_EVERY:
                    _save(out, index, writers)
                    saved = time.monotonic()

            read = batch[-1].bytes_read
            if start is None:
                start = read
                progress.stage("tokenizing")
            progress(read - start, max(total - start, 0), _counts(index))

        if not index["splits"]["train"]["documents"]:
            raise _no_documents(index)
        for writer in writers.values():
            writer.finish()

    index["complete"] = True
    write_index(out, index)


def _save(out: Path, index: Index, writers: Mapping[str, ShardWriter]) -> None:
    """Write the index after the shards, so that it describes only what is on disk."""
    for writer in writers.values():
        writer.sync()
    write_index(out, index)


def _counts(index: Index) -> str:
    """Return the numbers of documents and tokens so far."""
    splits = index["splits"].values()
    documents = sum(split["documents"] for split in splits)
    tokens = sum(split["tokens"] for split in splits)
    return f"{plural(documents, 'document')}, {plural(tokens, 'token')}"


def _write_piece(
    piece: EncodedPiece, writers: Mapping[str, ShardWriter], index: Index, repeats: Repeats | None
) -> bool:
    """Write, drop or skip a piece, and count it in the index; return whether it completes a shard."""
    if piece.error:
        count_skipped(index["skipped"], piece.error, piece.file, piece.lost)
    if piece.is_skipped:
        return False
    if piece.is_short:
        index["dropped"]["short"] += 1
        return False
    if repeats is not None and repeats.add(piece.begins_document, piece.identity):
        index["dropped"]["repeated"] += piece.begins_document
        return False

    index["markers"] += piece.markers
    writer = writers[piece.split]
    is_complete = writer.write(piece.ids)
    writer.entry["documents"] += piece.begins_document
    writer.entry["bytes"] += piece.size
    return is_complete


def _no_documents(index: Index) -> UserError:
    """Return the error for sources without documents for training."""
    first = index["skipped"]["first"][:1]
    reason = f"; the first error: {first[0]}" if first else ""
    return UserError(f"no documents for training ({_dropped(index)}): use other sources{reason}")


def _dropped(index: Index) -> str:
    """Return the numbers of documents and files that are not written, such as `1 file skipped`."""
    skipped = index["skipped"]
    dropped = index["dropped"]
    counts = [
        (skipped["documents"], f"{plural(skipped['documents'], 'document')} skipped"),
        (skipped["files"], f"{plural(skipped['files'], 'file')} skipped"),
        (dropped["short"], f"{dropped['short']:,} too short"),
    ]
    texts = [text for number, text in counts if number]
    return ", ".join(texts) or "none is readable"
