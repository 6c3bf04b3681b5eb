"""Settings: validation, and the round trip through JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Literal

import pytest
from helpers import MODELS
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt import model_settings
from jaxgpt.config import Config, ModelConfig
from jaxgpt.config_json import from_json, to_json
from jaxgpt.errors import UserError
from jaxgpt.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_json(name: str) -> None:
    assert from_json(to_json(preset(name))) == preset(name)


def test_json_integers_are_accepted_as_floats() -> None:
    assert from_json('{"model": {"dropout": 0}}').model.dropout == 0.0


words = st.sampled_from(["", "x", "\n", "\0", "\ud800", "rope"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
known_keys = st.sampled_from([f for section in asdict(Config()).values() if isinstance(section, dict) for f in section])


@given(
    st.dictionaries(
        st.sampled_from([*asdict(Config())]), st.dictionaries(known_keys, json_values, max_size=3) | json_values
    )
)
def test_any_json_gives_a_config_or_one_line_error(data: dict) -> None:  # type: ignore[type-arg]
    try:
        assert isinstance(from_json(json.dumps(data)), Config)
    except UserError as e:
        assert "\n" not in str(e)


def test_every_test_model_differs_from_the_default() -> None:
    assert len({to_json(m) for m in MODELS.values()}) == len(MODELS)


def test_settings_are_laid_over_a_config() -> None:
    base = preset("shakespeare")
    changed = base.with_settings({"train.steps": 7, "model.n_layer": 2})
    assert changed == replace(base, train=replace(base.train, steps=7)).with_model(n_layer=2)
    assert base.with_settings({}) == base


def test_a_given_path_drops_a_mixture_and_vice_versa() -> None:
    mixed = Config().with_settings({"data.mix": ("a=1", "b=2")})
    assert mixed.with_settings({"data.path": "c"}).data.mix == ()
    assert mixed.with_settings({"data.path": "c"}).with_settings({"data.mix": ("a=1",)}).data.path == ""


@pytest.mark.parametrize("mix", [("@1000", "b=1"), ()])
def test_a_mixture_that_begins_later_keeps_the_path(mix: tuple[str, ...]) -> None:
    """A schedule that begins with `@TOKENS` trains on data.path first; without mixtures, it is the only data."""
    config = Config().with_settings({"data.path": "c"})
    changed = config.with_settings({"data.mix": mix})
    assert (changed.data.path, changed.data.mix) == ("c", mix)


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(UserError, match=r"unknown setting train.step \(did you mean train.steps\?\)"):
        Config().with_settings({"train.step": 7})


def test_a_program_may_add_names_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/own/activation.md and docs/own/norm.md add names; config.json accepts them."""
    for name, setting in (("ActivationName", "activation"), ("NormName", "norm")):
        with pytest.raises(UserError, match=f"model.{setting} must be one of .*, not 'mine'"):
            ModelConfig(**{setting: "mine"})
        monkeypatch.setattr(model_settings, name, Literal[getattr(model_settings, name), "mine"])
        config = Config(model=ModelConfig(**{setting: "mine"}))
        assert from_json(to_json(config)) == config


@pytest.mark.parametrize(("name", "setting"), [("ActivationName", "activation"), ("NormName", "norm")])
def test_the_command_line_of_a_program_accepts_the_names_that_it_adds(name: str, setting: str) -> None:
    program = f"""
import sys
import jaxgpt.cli
from typing import Literal
from jaxgpt import model_settings
model_settings.{name} = Literal[model_settings.{name}, "mine"]
sys.argv = ["mine.py", "train", "--model.{setting}", "mine", "--train.steps", "-1"]
sys.exit(jaxgpt.cli.entry())
"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert made.returncode == 2
    assert "train.steps" in made.stderr
    assert "mine" not in made.stderr
