"""Outputs of `jaxgpt data prepare` of jaxgpt 0.1.0: what their index lacks, and what cannot be continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.index import Index, SettingsEntry, SourceEntry
from jaxgpt.data.prepared.sources import Source
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.word_patterns import pattern_after_digits
from jaxgpt.errors import UserError


def with_newer_settings(settings: SettingsEntry) -> dict[str, Any]:
    """Return the settings of an index; settings that an older index lacks have their defaults."""
    return asdict(PrepareParams()) | {"bos_ids": []} | dict(settings)


def with_newer_entries(index: Index, new: Index) -> Index:
    """Return an index; entries that an older index lacks come from a new index."""
    return {**new, **index, "skipped": {**new["skipped"], **index["skipped"]}}


def is_accepted_without_content(index: Index, source: SourceEntry) -> bool:
    """Return whether a complete output records a source without `content`; such an output no longer needs its sources."""
    return "content" not in source and index["complete"]


def check_older_files(out: Path, index: Index, sources: Sequence[Source]) -> None:
    """Raise `UserError` if an unfinished directory of 0.1.0 may have skipped a file that is now read."""
    if not _is_older(index) or index["complete"] or not index["skipped"]["documents"]:
        return
    paths = [path for source in sources for path in source.files]
    for path in paths:
        if ".json" in path.suffixes or path.suffix == ".zst":
            raise UserError(f"{out} was created by jaxgpt 0.1.0, which skipped {path}: choose a different --out")


def check_older_cuts(out: Path, index: Index, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if 0.1.0 cut the texts of an unfinished directory differently: its count of pieces is not valid."""
    if not _is_older(index) or not index["pieces"]:
        return
    if pattern_after_digits(json.loads(tokenizer.to_json())["pre_tokenizer"]):
        raise UserError(f"{out} was created by jaxgpt 0.1.0, which cut texts differently: choose a different --out")


def _is_older(index: Index) -> bool:
    """Return whether an index was written by jaxgpt 0.1.0."""
    return "separator" not in index["settings"]
