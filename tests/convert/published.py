"""The config.json of published models (2019 to 2025), one per line of published.jsonl, without long label lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Published(NamedTuple):
    """A published config.json.

    Attributes:
        config: its content.
        parameters: number of parameters of the model; 0: the import is rejected.
        refused: pattern of the error message of a rejected import.
        accept: options that a user may choose to ignore.
    """

    config: dict[str, Any]
    parameters: int = 0
    refused: str = ""
    accept: tuple[str, ...] = ()


ROWS = map(json.loads, Path(__file__).with_suffix(".jsonl").read_text("utf-8").splitlines())
PUBLISHED = {row.pop("name"): Published(**row) for row in ROWS}
# tests/parity/test_wrappers.py compares the text models of multimodal models.
IMPORTED = [
    name
    for name, model in PUBLISHED.items()
    if model.parameters and not model.refused and "text_config" not in model.config
]
