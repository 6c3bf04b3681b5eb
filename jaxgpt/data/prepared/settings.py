"""Settings of `jaxgpt data prepare` in the index: a continued command must have the same settings and sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.index import Index, SettingsEntry, SourceEntry
from jaxgpt.data.prepared.older_outputs import is_accepted_without_content, with_newer_settings
from jaxgpt.data.prepared.sources import Source
from jaxgpt.errors import UserError, plural, short_repr


def settings_entry(
    params: PrepareParams, sources: Sequence[Source], tokenizer_sha256: str, bos_ids: list[int]
) -> SettingsEntry:
    """Return the entry of the index that a continued command is compared with.

    The parameters `workers` and `on_error` do not affect the written bytes; `bos` affects them only through `bos_ids`.

    Args:
        params: parameters of the command.
        sources: sources of the command.
        tokenizer_sha256: SHA-256 of the tokenizer, without the changes of the parameter `bos`; "": it will be trained.
        bos_ids: ids before each document.
    """
    return {
        "tokenizer": params.tokenizer,
        "vocab_size": params.vocab_size,
        "format": params.format,
        "shard_tokens": params.shard_tokens,
        "val_fraction": params.val_fraction,
        "field": params.field,
        "separator": params.separator,
        "dedup": params.dedup,
        "min_characters": params.min_characters,
        "sources": [source.entry() for source in sources],
        "tokenizer_sha256": tokenizer_sha256,
        "bos_ids": bos_ids,
    }


def check_continued(out: Path, index: Index, settings: SettingsEntry, note: Callable[[str], None]) -> None:
    """Check that a continued command has the settings and sources of the index.

    Args:
        out: directory of the index.
        index: index of the directory.
        settings: settings of the command.
        note: callback for one-line messages to the user.

    Raises:
        UserError: if a setting or source differs.
    """
    recorded = with_newer_settings(index["settings"])
    for name, value in settings.items():
        if name in ("sources", "bos_ids"):  # compared below
            continue
        was = recorded.get(name)
        if was != value:
            raise UserError(
                f"{out} was created with {name} {short_repr(was)}, not {short_repr(value)}: use the same value, or a different "
                "--out"
            )

    if recorded["bos_ids"] != settings["bos_ids"]:
        raise UserError(
            f"{out} was created with the ids {recorded['bos_ids']} before each document, not {settings['bos_ids']}: use a "
            "different --bos, or a different --out"
        )
    _check_sources(out, index, settings["sources"], note)


def _check_sources(out: Path, index: Index, now: Sequence[SourceEntry], note: Callable[[str], None]) -> None:
    """Raise `UserError` if a continued command has other sources than the index.

    Modification times may differ if the sizes and samples of the content are equal, as after a copy.
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
        compared = "" if is_unknown else "; sizes and samples of the content are equal"
        note(f"{source['name']}: files have new modification times{compared}")


def _name_and_sizes(source: SourceEntry) -> tuple[str, int, int]:
    """Return the name of a source, its number of files and their total size."""
    return source["name"], source["files"], source["size"]


def _listed(sources: Sequence[SourceEntry]) -> str:
    """Format a list of sources for an error."""
    texts = [f"{each['name']} ({plural(each['files'], 'file')}, {each['size']:,} bytes)" for each in sources]
    return ", ".join(texts)
