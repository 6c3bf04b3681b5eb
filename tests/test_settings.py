"""Every setting is used and has a description."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from helpers import repository

from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig

SECTIONS = (ModelConfig, DataConfig, OptimConfig, TrainConfig, MeshConfig, Config)
CODE = "".join(
    path.read_text() for path in (repository() / "jaxgpt").rglob("*.py") if path.name not in ("config.py", "presets.py")
)
# Settings whose zero means "derived from the others" are read by the properties that derive them.
CODE += " ".join(re.findall(r"return (self\.\w+) or ", (repository() / "jaxgpt/config.py").read_text()))


@pytest.mark.parametrize("name", sorted({f.name for section in SECTIONS for f in fields(section)}))
def test_every_setting_is_read(name: str) -> None:
    assert re.search(rf"""(\.{name}\b|"{name}")""", CODE), f"nothing reads {name}"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_has_a_description(section: type) -> None:
    source = (repository() / "jaxgpt/config.py").read_text()
    for f in fields(section):
        described = rf"^    ({f.name}: .*  # \S|# \S.*\n    {f.name}: )"
        assert re.search(described, source, re.M), f"{section.__name__}.{f.name} has no description"
