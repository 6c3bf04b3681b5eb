"""Position of a follower: the part of a run that a tracker has received, in RUN/trackers/NAME/position.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from jaxgpt.errors import UserError
from jaxgpt.files import read_json

FILE = "position.json"


class Position(NamedTuple):
    """The part of a run that a tracker has received.

    Attributes:
        id: name of the run in the tracker.
        order: `Row.order` of the last row sent; -1: no row.
        mark: the last result of `Tracker.send`.
        ended: status that closed the page; "": the page is open, or no page was opened.
    """

    id: str
    order: int = -1
    mark: str = ""
    ended: str = ""

    @staticmethod
    def read(directory: Path) -> Position | None:
        """Read the position of the last follower; None: there was no follower.

        Raises:
            UserError: if the file is damaged.
        """
        path = directory / FILE
        if not path.exists():
            return None
        values = read_json(path)
        types = {"id": str, "order": int, "mark": str, "ended": str}
        if {name: type(value) for name, value in values.items()} != types:
            raise UserError(f"{path} is damaged: delete {directory} to send the run again, to a new page")
        return Position(**values)

    def write(self, directory: Path) -> None:
        """Replace the file. A kill leaves the old or the new position; only a power failure can lose the position."""
        draft = directory / f"{FILE}.partial"
        draft.write_text(json.dumps(self._asdict()), "utf-8")
        draft.replace(directory / FILE)
