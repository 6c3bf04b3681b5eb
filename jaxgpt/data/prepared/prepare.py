"""Tokenize documents into shards of ids, on all cores and in bounded memory.

Documents are a numbered sequence of pieces (`DocumentPiece`). index.json records the number of processed pieces, and
the length of each shard at that moment. After an interruption, the shards are truncated to these lengths and encoding continues
with the next piece. The output is the same as without the interruption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

from jaxgpt.config import PrepareParams
from jaxgpt.cpu import cores
from jaxgpt.data.prepared.documents import read_pieces
from jaxgpt.data.prepared.index import SPLITS, Index
from jaxgpt.data.prepared.older_outputs import check_older_cuts
from jaxgpt.data.prepared.output import new_output, open_index
from jaxgpt.data.prepared.output_tokenizer import check_id_width, choose_tokenizer, set_tokenizer, train_tokenizer
from jaxgpt.data.prepared.piece_batches import batches_of, encode_in_threads
from jaxgpt.data.prepared.piece_encoder import PieceEncoder
from jaxgpt.data.prepared.repeats import repeats_of
from jaxgpt.data.prepared.samples import beginning, check_first
from jaxgpt.data.prepared.settings import settings_entry
from jaxgpt.data.prepared.shards import check_files, saved_tokenizer
from jaxgpt.data.prepared.source_notes import repeated_text, structured_text
from jaxgpt.data.prepared.sources import Source, find_source
from jaxgpt.data.prepared.writing import write_pieces
from jaxgpt.directories import INDEX
from jaxgpt.errors import UserError, plural, short_repr
from jaxgpt.progress import NO_PROGRESS, Progress


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
        progress: receives the bytes of the sources read after the first batch, and the numbers of documents and tokens.
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

    chosen = choose_tokenizer(params)
    check_id_width(params, chosen.vocab_size)
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
                tokenizer = train_tokenizer(sources, params)
            set_tokenizer(out, index, tokenizer, params.tokenizer, chosen.bos_ids)
        _write_remaining(out, index, sources, params, progress)
        if params.separator and not _is_divided(index, sources):
            note(
                f"--separator {short_repr(params.separator)} separates no documents of the sources; a line break is $'\\n' in "
                f"most shells, not '\\n'"
            )
        return index


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

    # Reading the pieces that an interrupted command has processed advances `pieces` to the resume position.
    processed = islice(pieces, index["pieces"])
    if params.dedup == "exact":
        repeats = repeats_of(processed, params)
    else:
        repeats = None
        deque(processed, maxlen=0)  # read without keeping them

    encoder = PieceEncoder(tokenizer, params, index["settings"].get("bos_ids", []))
    encoded = encode_in_threads(encoder.encode_batch, batches_of(pieces), params.workers or cores())
    total = sum(source.size for source in sources)
    try:
        with closing(encoded):
            write_pieces(out, index, encoded, repeats, progress, total)
    except OSError as e:  # for example, a full disk
        raise OSError(e.errno, e.strerror, e.filename or str(out)) from None


def _is_divided(index: Index, sources: Sequence[Source]) -> bool:
    """Return whether there are more documents than files, including documents that are not written."""
    documents = sum(index["splits"][split]["documents"] for split in SPLITS)
    dropped = index["dropped"]["repeated"] + index["dropped"]["short"] + index["skipped"]["documents"]
    return documents + dropped > sum(len(source.files) for source in sources)
