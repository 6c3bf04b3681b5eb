"""Output directory of `jaxgpt data prepare`: create it, continue it, or remove its new files after an early error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxgpt.data.prepared.index import KIND, SPLITS, Index, SettingsEntry, read_index, write_index
from jaxgpt.data.prepared.older_outputs import check_older_files, with_newer_entries
from jaxgpt.data.prepared.settings import check_continued
from jaxgpt.data.prepared.skips import no_skips
from jaxgpt.data.prepared.sources import Source
from jaxgpt.directories import INDEX
from jaxgpt.errors import UserError, reported
from jaxgpt.locks import LOCK, sole_writer


@contextmanager
def new_output(out: Path) -> Iterator[None]:
    """Create and lock the output directory; if an error occurs before documents are recorded, remove the new files.

    A BPE tokenizer is kept, because its training takes long.
    """
    with reported(f"cannot write to {out}"):
        created = [path for path in (out, *out.parents) if not path.exists()]
        out.mkdir(parents=True, exist_ok=True)
        others = any(not path.name.startswith(".") for path in out.iterdir())  # the lock and temporary files are hidden
    if others and read_index(out) is None:
        raise UserError(f"{out} has files, but not from this version of jaxgpt data prepare: choose a different --out")

    with sole_writer(out):
        before = {path.name for path in out.iterdir() if path.name != LOCK}  # this process owns the lock file
        try:
            yield
        except (Exception, KeyboardInterrupt):
            if INDEX not in before and not _has_results(out):
                _remove_new(out, before, created)
            raise


def _has_results(out: Path) -> bool:
    """Return whether the index in a directory records documents or a trained tokenizer."""
    index = read_index(out)
    if index is None:
        return False
    is_trained = index["settings"]["tokenizer"] == "bpe" and "tokenizer" in index
    return is_trained or index["pieces"] > 0


def _remove_new(out: Path, before: set[str], created: Sequence[Path]) -> None:
    """Remove the files of a directory that are not in `before`, and the created directories, if they are empty."""
    for path in out.iterdir():
        if path.name not in before and path.is_file():
            path.unlink()
    with suppress(OSError):  # a directory that holds other files
        for directory in created:
            directory.rmdir()


def open_index(out: Path, settings: SettingsEntry, sources: Sequence[Source], note: Callable[[str], None]) -> Index:
    """Read the index of a directory to continue it, or start again: write an index, and delete .bin files.

    Settings may change until the first piece is written.

    Raises:
        UserError: if a continued command has other settings or sources than the index, or jaxgpt 0.1.0 may have skipped a
            file that is now read.
    """
    index = read_index(out)
    is_continued = index is not None and (index["pieces"] > 0 or index["settings"] == settings)
    if index is None or not is_continued:
        return _begin(out, settings)
    check_continued(out, index, settings, note)
    check_older_files(out, index, sources)
    return with_newer_entries(index, _new_index(settings))


def _begin(out: Path, settings: SettingsEntry) -> Index:
    """Write the index of a directory without documents, and delete .bin files."""
    for path in out.glob("*.bin"):
        path.unlink()
    index = _new_index(settings)
    write_index(out, index)
    return index


def _new_index(settings: SettingsEntry) -> Index:
    """Return the index of a directory without documents."""
    return {
        "kind": KIND,
        "complete": False,
        "settings": settings,
        "pieces": 0,
        "skipped": no_skips(),
        "dropped": {"short": 0, "repeated": 0},
        "markers": 0,
        "splits": {split: {"documents": 0, "tokens": 0, "bytes": 0, "shards": []} for split in SPLITS},
    }
