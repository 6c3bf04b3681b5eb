"""checkpoint.json: the facts about a checkpoint, and the digests of its files.

`store.py` describes the files of a checkpoint, and `intact.py` verifies them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxgpt.atomic import write_atomically
from jaxgpt.config import Config
from jaxgpt.config_json import from_json
from jaxgpt.errors import UserError
from jaxgpt.files import read_bytes, sha256_file
from jaxgpt.strict_json import parse_json

SEAL = "checkpoint.json"


@dataclass(frozen=True)
class Info:
    """Content of checkpoint.json."""

    step: int  # number of steps taken
    val_loss: float | None = None  # ranking of the first evaluator, by default the validation loss; None: no ranking
    tokens: int = 0  # number of tokens in the windows of all training steps so far
    temporary: bool = False  # whether written by a timer or when training stops; deleted after the next checkpoint
    about: Mapping[str, Any] = field(default_factory=dict)  # config, versions, digests, given parts, best loss
    sha256: Mapping[str, str] = field(default_factory=dict)  # file digests, keyed by path, including checkpoint.json

    @property
    def ranked_by(self) -> str | None:
        """Name of the evaluator given in Python that ranked the checkpoint; "": from the settings; None: not recorded."""
        return self._given("evaluators")

    @property
    def model(self) -> str | None:
        """Name of the subclass of GPT that was given in Python; "": a plain GPT; None: not recorded."""
        return self._given("model")

    def _given(self, part: str) -> str | None:
        """Return the name of a part of the run that was given in Python; "": not given; None: not recorded."""
        given = self.about.get("given")
        return None if given is None else given.get(part, "")

    def config(self) -> Config:
        """Return the settings of the run when the checkpoint was written."""
        return from_json(json.dumps(self.about.get("config")), f"the config in {SEAL}")


def seal(path: Path, info: Info) -> None:
    """Flush the files of a checkpoint to disk, and write checkpoint.json with their digests, atomically.

    Directories are not flushed: a file that a power failure removes is listed in checkpoint.json, so its loss is detected.
    """
    digests = {}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        digests[file.relative_to(path).as_posix()] = sha256_file(file)
    write_atomically(path / SEAL, _render(replace(info, sha256=digests)))


def _render(info: Info) -> str:
    """Format the content of checkpoint.json, including its own digest."""
    values = asdict(info)
    values["sha256"].pop(SEAL, None)
    content = json.dumps(values, allow_nan=False)
    values["sha256"][SEAL] = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps(values, indent=1) + "\n"


def read_info(path: Path) -> Info:
    """Read the checkpoint.json of a checkpoint; raise `UserError` if it is unreadable or has changed."""
    text = read_bytes(path / SEAL)
    with suppress(AttributeError, RecursionError, TypeError, ValueError):  # not JSON, or not an `Info`
        info = Info(**parse_json(text, SEAL))
        if info.step == int(path.name) and _render(info).encode() == text:
            return info
    raise UserError(f"{SEAL} has changed since it was written")


def replace_info(path: Path, info: Info) -> None:
    """Replace the checkpoint.json of a sealed checkpoint, except its digests, atomically."""
    digests = read_info(path).sha256
    write_atomically(path / SEAL, _render(replace(info, sha256=digests)))
