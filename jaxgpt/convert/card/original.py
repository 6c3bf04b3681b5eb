"""The model card that a run was imported with."""

from __future__ import annotations

import re
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


class Card(NamedTuple):
    """A model card.

    Attributes:
        metadata: its front matter, without the lines `---`; "": none.
        text: the remainder.
    """

    metadata: str
    text: str


def split_card(card: str) -> Card:
    """Split a card into its front matter and its text."""
    found = re.match(r"---\n(.*?)\n---\s*(?:\n|$)", card, re.DOTALL)
    if found is None:
        return Card("", card)
    return Card(found[1] + "\n", card[found.end() :])


def original_card(run: Path, config: Config) -> str:
    """Return the card that a run, or a run that it descends from, was imported with, or ""."""
    seen: set[Path] = set()
    while run.resolve() not in seen:
        seen.add(run.resolve())
        card = read_card(run)
        if card or not config.init_from:
            return card
        recorded, _ = parse_checkpoint(config.init_from)
        next_to_run = run.absolute().parent / recorded.name
        run = recorded if recorded.is_dir() else next_to_run
        try:
            config = Run(run).config()
        except (OSError, UserError):  # a missing or damaged run has no further ancestors
            return read_card(run)
    return ""


def read_card(directory: Path) -> str:
    """Return the text of a directory's README.md, or "" if the file is missing or unreadable."""
    with suppress(UserError):
        text = read_bytes(directory / CARD, CARD_BYTES).decode("utf-8-sig", errors="replace")
        return text.replace("\r\n", "\n")
    return ""
