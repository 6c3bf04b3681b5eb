"""No dead setting: each is read somewhere, and every preset can be built."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from helpers import repository

from jaxgpt.cli.info import describe, with_vocab
from jaxgpt.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxgpt.presets import PRESETS, preset

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
def test_every_setting_says_what_it_is(section: type) -> None:
    source = (repository() / "jaxgpt/config.py").read_text()
    for f in fields(section):
        described = rf"^    ({f.name}: .*  # \S|# \S.*\n    {f.name}: )"
        assert re.search(described, source, re.M), f"{section.__name__}.{f.name} has no description"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built(name: str) -> None:
    figures = describe(with_vocab(preset(name)))
    assert figures["parameters"] > 0
    assert figures["bytes"]["parameters"] == 4 * figures["parameters"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("statquest", 37), ("nanogpt-cpu", 804_096), ("nanogpt-gpu", 10_745_088), ("gpt2", 124_439_808)],
)
def test_parameters_of_published_models(name: str, parameters: int) -> None:
    assert describe(with_vocab(preset(name)))["parameters"] == parameters


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_how_to_start_it_and_what_to_expect(name: str) -> None:
    from jaxgpt.presets import describe as said

    assert said(name).command.startswith("python train.py")
    assert said(name).expect
