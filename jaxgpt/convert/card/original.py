"""The model card that a run was imported with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.files import read_bytes

CARD = "README.md"
CARD_BYTES = 1 << 20  # maximum size of a card in bytes
# Front matter: lines between two lines `---`, from the beginning of the card.
FRONT_MATTER = re.compile(r"---\n((?:.*\n)*?)---\s*(?:\n|$)")
ENTRY = re.compile(r"^[\w-]+:(?:\s|$)", re.MULTILINE)  # beginning of an entry of the metadata


class Card(NamedTuple):
    """A model card.

    Attributes:
        metadata: lines of its front matter, without the lines `---`; "": none.
        text: the remainder.
    """

    metadata: str
    text: str


def split_card(card: str) -> Card:
    """Split a card into its front matter and its text."""
    found = FRONT_MATTER.match(card)
    if found is None:
        return Card("", card)
    metadata = found[1]
    if metadata and not ENTRY.search(metadata):  # text between two horizontal rules
        return Card("", card)
    return Card(metadata, card[found.end() :])


def original_card(run: Path, config: Config) -> str:
    """Return the card that a run, or a run that it descends from, was imported with, or ""."""
    for directory in _lineage(run, config):
        card = read_card(directory)
        if card:
            return card
    return ""


def _lineage(run: Path, config: Config) -> Iterator[Path]:
    """Yield the directory of a run, of the run that its initial weights are from, and so on, each once."""
    seen: set[Path] = set()
    directory = run
    init_from = config.init_from
    while directory.resolve() not in seen:
        seen.add(directory.resolve())
        yield directory
        if not init_from:
            return
        directory = _initial_run(directory, init_from)
        try:
            init_from = Run(directory).config().init_from
        except (OSError, UserError):  # a missing or damaged run has no known ancestors
            init_from = ""


def _initial_run(directory: Path, init_from: str) -> Path:
    """Return the directory of the run in `init_from`, or next to the run that was initialized, if both were moved."""
    recorded, _ = parse_checkpoint(init_from)
    if recorded.is_dir():
        return recorded
    return directory.absolute().parent / recorded.name


def read_card(directory: Path) -> str:
    """Return the text of a directory's README.md, or "" if the file is missing or unreadable."""
    with suppress(UserError):
        text = read_bytes(directory / CARD, CARD_BYTES).decode("utf-8-sig", errors="replace")
        return text.replace("\r\n", "\n")
    return ""
