"""checkpoint.json: the facts about a checkpoint, and the digests of its files.

`store.py` describes the files of a checkpoint, and `intact.py` verifies them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from jaxgpt.atomic import write_atomically
from jaxgpt.config import Config
from jaxgpt.config_json import from_json
from jaxgpt.errors import UserError
from jaxgpt.files import read_bytes, sha256_file
from jaxgpt.strict_json import parse_json

SEAL = "checkpoint.json"


FrozenPart = Literal["base", "frozen"]  # names of checksums of frozen arrays


class About(TypedDict, total=False):
    """Facts about the run of a checkpoint. Weights from imports or `jaxgpt.save` have at most `config`, `base` and `given`.

    Version 0.1.0 did not record `sources`, `data_tokens`, `boundaries`, `held_out`, `files`, `given` and `since_best`.
    """

    config: dict[str, Any]  # settings of the run
    versions: dict[str, str]  # versions of the software (`jaxgpt.provenance.versions`)
    # The data (`about_data`).
    data: str  # fingerprint of all data
    sources: list[str]  # fingerprint of each source in the settings
    data_tokens: int
    boundaries: dict[str, int | None]  # `Recorded.boundary` of each open source, keyed by fingerprint
    held_out: bool  # whether the training data exclude the validation data
    files: dict[str, dict[str, str]]  # digest of each file, keyed by the fingerprint of the source and by path
    # The parts that a resumed run must receive again (`RunParts`).
    base: str  # SHA-256 of the base of adapters or, without adapters, of the frozen arrays of the objective
    frozen: str  # with adapters, SHA-256 of the frozen arrays of the objective
    given: Mapping[str, str]  # names of the parts given in Python, keyed by part; "": a part without a name
    # The best evaluation so far (`Best`).
    best: tuple[float, int]  # ranking and step of the best evaluation; absent: no evaluation had a finite ranking
    since_best: int  # number of evaluations after the best evaluation; without `best`, all evaluations


@dataclass(frozen=True)
class Info:
    """Content of checkpoint.json."""

    step: int  # number of steps taken
    ranking: float | None = (
        None  # ranking by the first evaluator, lower is better (`val_loss` in the file); None: no ranking
    )
    tokens: int = 0  # number of tokens in the windows of all training steps so far
    temporary: bool = False  # whether written by a timer or when training stops; deleted after the next checkpoint
    about: About = field(default_factory=About)
    sha256: Mapping[str, str] = field(default_factory=dict)  # file digests, keyed by path, including checkpoint.json

    @property
    def ranked_by(self) -> str | None:
        """Name of the evaluator given in Python that ranked the checkpoint; "": from the settings; None: not recorded."""
        given = self.about.get("given")
        return None if given is None else given.get("evaluators", "")

    @property
    def model(self) -> str:
        """Name of the subclass of GPT that was given in Python; "": a plain GPT, or not recorded."""
        return self.about.get("given", {}).get("model", "")

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


def read_info(path: Path) -> Info:
    """Read the checkpoint.json of a checkpoint; raise `UserError` if it is unreadable or has changed."""
    text = read_bytes(path / SEAL)
    try:
        values = parse_json(text, SEAL)
        info = Info(ranking=values.pop("val_loss"), **values)
        is_intact = info.step == int(path.name) and _render(info).encode() == text
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):  # not JSON, or not an `Info`
        is_intact = False
    if not is_intact:
        raise UserError(f"{SEAL} has changed since it was written")
    return info


def replace_info(path: Path, info: Info) -> None:
    """Atomically replace the checkpoint.json of a sealed checkpoint; the digests of the other files are kept."""
    digests = read_info(path).sha256
    write_atomically(path / SEAL, _render(replace(info, sha256=digests)))


def _render(info: Info) -> str:
    """Format the content of checkpoint.json. Its last digest covers all other values, as JSON in one line."""
    digests = {name: digest for name, digest in info.sha256.items() if name != SEAL}
    values = {
        "step": info.step,
        "val_loss": info.ranking,
        "tokens": info.tokens,
        "temporary": info.temporary,
        "about": info.about,
        "sha256": digests,
    }
    content = json.dumps(values, allow_nan=False)
    digests[SEAL] = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps(values, indent=1) + "\n"
