"""Output directory of `jaxgpt data prepare`: create it, continue it, or remove it after an early error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxgpt.config import PrepareParams
from jaxgpt.data.dropped import no_skips
from jaxgpt.data.index import KIND, SPLITS, Index, read_index, write_index
from jaxgpt.data.older_outputs import check_older_files, has_unknown_content, with_newer_entries, with_newer_settings
from jaxgpt.data.shards import TOKENIZER_FILE, token_dtype
from jaxgpt.data.sources import Source
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokenizer_files import save_tokenizer
from jaxgpt.directories import INDEX
from jaxgpt.errors import UserError, plural, reported, short_repr
from jaxgpt.files import sha256_file
from jaxgpt.locks import LOCK, sole_writer

ANY_VALUE = ("workers", "on_error", "bos")  # parameters that do not affect the written bytes, or only through bos_ids


@contextmanager
def new_output(out: Path) -> Iterator[None]:
    """Create and lock the output directory; after an error without any recorded documents, remove what was created.

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
        before = {path.name for path in out.iterdir()} - (set() if had_lock else {LOCK})
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
    """Write the tokenizer, and record it in the index."""
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


def open_index(
    out: Path,
    params: PrepareParams,
    sources: Sequence[Source],
    tokenizer_sha256: str,
    bos_ids: list[int],
    note: Callable[[str], None],
) -> Index:
    """Read the index of a directory to continue it, or start again: write an index, and delete .bin files.

    Parameters may change until the first piece is written. The index records the ids of the parameter `bos`.

    Raises:
        UserError: if a continued command has other settings or sources than the index.
    """
    settings: dict[str, Any] = {name: value for name, value in asdict(params).items() if name not in ANY_VALUE}
    settings["sources"] = [source.entry() for source in sources]
    settings["tokenizer_sha256"] = tokenizer_sha256
    settings["bos_ids"] = bos_ids

    index = read_index(out)
    is_continued = index is not None and (index["pieces"] > 0 or index["settings"] == settings)
    if index is None or not is_continued:
        return _begin(out, settings)
    _check_settings(out, index, settings)
    _check_sources(out, index, settings["sources"], note)
    check_older_files(out, index, sources)
    return with_newer_entries(index, _new_index(settings))


def _begin(out: Path, settings: dict[str, Any]) -> Index:
    """Write the index of a directory without documents, and delete .bin files."""
    for path in out.glob("*.bin"):
        path.unlink()
    index = _new_index(settings)
    write_index(out, index)
    return index


def _new_index(settings: dict[str, Any]) -> Index:
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


def _check_settings(out: Path, index: Index, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` if a continued command has other settings than the index."""
    recorded = with_newer_settings(index["settings"])
    for key, value in settings.items():
        was = recorded.get(key)
        if key == "bos_ids" and was != value:
            raise UserError(
                f"{out} was created with the ids {was} before each document, not {value}: use a different --bos, or a "
                f"different --out"
            )
        if key != "sources" and was != value:
            raise UserError(
                f"{out} was created with {key} {_shown(was)}, not {_shown(value)}: use the same value, or a different --out"
            )


def _check_sources(out: Path, index: Index, now: Sequence[Mapping[str, Any]], note: Callable[[str], None]) -> None:
    """Raise `UserError` if a continued command has other sources than the index.

    Modification times may differ if the content of the files is the same, as after a copy.
    """
    before = index["settings"]["sources"]
    listed_before = [_listed(each) for each in before]
    listed_now = [_listed(each) for each in now]
    if listed_before != listed_now:
        raise UserError(
            f"{out} was created with sources {_shown(before)}, not {_shown(now)}: use the same sources, or a different --out"
        )
    for was, source in zip(before, now, strict=True):
        if was["fingerprint"] == source["fingerprint"]:
            continue
        is_unknown = has_unknown_content(index, was)
        if was.get("content") != source["content"] and not is_unknown:
            fix = "restore them (cp -p keeps the times), or use a different --out"
            raise UserError(
                f"{source['name']}: names, modification times or content of its files changed since {out} was created: {fix}"
            )
        compared = "" if is_unknown else "; sizes and content are equal"
        note(f"{source['name']}: files have new modification times{compared}")


def _listed(source: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the name of a source, its number of files and their size."""
    return source["name"], source["files"], source["size"]


def _shown(value: Any) -> str:
    """Format the value of a parameter, or the list of sources."""
    if not isinstance(value, list):
        return short_repr(value)
    return ", ".join(f"{each['name']} ({plural(each['files'], 'file')}, {each['size']:,} bytes)" for each in value)
