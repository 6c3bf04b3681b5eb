"""Output directory of `jaxgpt data prepare`: create it, continue it, or remove it after an early error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.dropped import no_skips
from jaxgpt.data.prepared.index import KIND, SPLITS, Index, SettingsEntry, SourceEntry, read_index, write_index
from jaxgpt.data.prepared.older_outputs import (
    check_older_files,
    is_accepted_without_content,
    with_newer_entries,
    with_newer_settings,
)
from jaxgpt.data.prepared.shards import TOKENIZER_FILE, token_dtype
from jaxgpt.data.prepared.sources import Source
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.files import save_tokenizer
from jaxgpt.directories import INDEX
from jaxgpt.errors import UserError, plural, reported, short_repr
from jaxgpt.files import sha256_file
from jaxgpt.locks import LOCK, sole_writer

ANY_VALUE = ("workers", "on_error", "bos")  # parameters that do not affect the written bytes, or only through bos_ids


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

    had_lock = (out / LOCK).exists()
    with sole_writer(out):
        before = {path.name for path in out.iterdir()}
        if not had_lock:
            before.discard(LOCK)  # `sole_writer` has created it
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


def set_tokenizer(out: Path, index: Index, tokenizer: Tokenizer, name: str, bos_ids: Sequence[int]) -> None:
    """Write the tokenizer, and record it in `index` and on disk."""
    save_tokenizer(out, tokenizer)
    index["dtype"] = token_dtype(tokenizer.vocab_size).name
    index["tokenizer"] = {
        "name": name,
        "sha256": sha256_file(out / TOKENIZER_FILE),
        "vocab_size": tokenizer.vocab_size,
        "end_id": tokenizer.eos_id,
        "bos": tokenizer.decode(bos_ids),
    }
    write_index(out, index)


def settings_entry(
    params: PrepareParams, sources: Sequence[Source], tokenizer_sha256: str, bos_ids: list[int]
) -> SettingsEntry:
    """Return the entry of the index that a continued command is compared with.

    Args:
        params: parameters of the command.
        sources: sources of the command.
        tokenizer_sha256: SHA-256 of the tokenizer, without the changes of the parameter `bos`; "": it will be trained.
        bos_ids: ids before each document, which the parameter `bos` determines.
    """
    settings: dict[str, Any] = {name: value for name, value in asdict(params).items() if name not in ANY_VALUE}
    settings["sources"] = [source.entry() for source in sources]
    settings["tokenizer_sha256"] = tokenizer_sha256
    settings["bos_ids"] = bos_ids
    return cast(SettingsEntry, settings)


def open_index(out: Path, settings: SettingsEntry, sources: Sequence[Source], note: Callable[[str], None]) -> Index:
    """Read the index of a directory to continue it, or start again: write an index, and delete .bin files.

    Settings may change until the first piece is written.

    Raises:
        UserError: if a continued command has other settings or sources than the index.
    """
    index = read_index(out)
    is_continued = index is not None and (index["pieces"] > 0 or index["settings"] == settings)
    if index is None or not is_continued:
        return _begin(out, settings)
    _check_settings(out, index, settings)
    _check_sources(out, index, settings["sources"], note)
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


def _check_settings(out: Path, index: Index, settings: SettingsEntry) -> None:
    """Raise `UserError` if a continued command has other settings than the index; sources are not compared."""
    recorded = with_newer_settings(index["settings"])
    for name, value in settings.items():
        was = recorded.get(name)
        if name not in ("sources", "bos_ids") and was != value:
            raise UserError(
                f"{out} was created with {name} {short_repr(was)}, not {short_repr(value)}: use the same value, or a different "
                f"--out"
            )

    bos_ids = settings["bos_ids"]
    if recorded["bos_ids"] != bos_ids:
        raise UserError(
            f"{out} was created with the ids {recorded['bos_ids']} before each document, not {bos_ids}: use a different --bos, "
            f"or a different --out"
        )


def _check_sources(out: Path, index: Index, now: Sequence[SourceEntry], note: Callable[[str], None]) -> None:
    """Raise `UserError` if a continued command has other sources than the index.

    Modification times may differ if the content of the files is the same, as after a copy.
    """
    before = index["settings"]["sources"]
    if [*map(_name_and_sizes, before)] != [*map(_name_and_sizes, now)]:
        raise UserError(
            f"{out} was created with sources {_listed(before)}, not {_listed(now)}: use the same sources, or a different --out"
        )
    for was, source in zip(before, now, strict=True):
        if was["fingerprint"] == source["fingerprint"]:
            continue
        is_unknown = is_accepted_without_content(index, was)
        if was.get("content") != source["content"] and not is_unknown:
            fix = "restore them (cp -p keeps the times), or use a different --out"
            raise UserError(
                f"{source['name']}: names, modification times or content of its files changed since {out} was created: {fix}"
            )
        compared = "" if is_unknown else "; sizes and content are equal"
        note(f"{source['name']}: files have new modification times{compared}")


def _name_and_sizes(source: SourceEntry) -> tuple[str, int, int]:
    """Return the name of a source, its number of files and their total size."""
    return source["name"], source["files"], source["size"]


def _listed(sources: Sequence[SourceEntry]) -> str:
    """Format a list of sources for an error."""
    texts = [f"{each['name']} ({plural(each['files'], 'file')}, {each['size']:,} bytes)" for each in sources]
    return ", ".join(texts)
