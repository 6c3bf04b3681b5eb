"""Every setting is used and has a description."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import Field, fields
from math import inf, nan, nextafter
from typing import Any

import numpy as np
import pytest
from helpers import nodes, repository

from jaxgpt.config import (
    BeamParams,
    Config,
    DataConfig,
    DistributedConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PostConfig,
    SamplingParams,
    TextParams,
    TrainConfig,
)
from jaxgpt.errors import UserError
from jaxgpt.parallel.rules import RULES
from jaxgpt.settings import as_int

SECTIONS = (ModelConfig, DataConfig, OptimConfig, TrainConfig, MeshConfig, PostConfig, DistributedConfig, Config)
# Variable names of the configs of each class. `norm` of `jnp.linalg` or `name` of a path is not a setting.
CALLED: dict[type, set[str]] = {
    ModelConfig: {"model", "config", "c", "m"},
    DataConfig: {"data"},
    OptimConfig: {"optim", "o"},
    TrainConfig: {"train"},
    MeshConfig: {"mesh"},
    PostConfig: {"post", "settings"},
    DistributedConfig: {"config"},
    Config: {"config", "old", "new"},
}
# Properties that are read instead of settings.
DERIVED = {
    "kv_heads": {"n_kv_head"},
    "head_width": {"head_dim"},
    "mlp_width": {"n_inner"},
    "rotary_width": {"rope_fraction"},
    "windows": {"sliding_window", "window_pattern"},
    "template_variables": {"chat_template_kwargs"},
    "computes_reference_once": {"reference_log_p"},
}


def attributes(source: str) -> set[tuple[str, str]]:
    """Return every attribute that a module reads, with the name of its owner: `a.b.c` is `("b", "c")`."""
    found = set()
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if isinstance(owner, ast.Name | ast.Attribute):
                found.add((owner.id if isinstance(owner, ast.Name) else owner.attr, node.attr))
    return found


@functools.cache
def read_in_package() -> set[tuple[str, str]]:
    """Return the attributes that the package reads, except in code that declares settings or copies them."""
    package = repository() / "jaxgpt"
    found = set()
    for path in package.rglob("*.py"):
        declares = path.name in ("config.py", "options.py", "presets.py") or path.stem.endswith("_settings")
        copies = path.parent.name == "convert"
        if not declares and not copies:
            found |= attributes(path.read_text())
    return found


def unread(section: type, read: set[tuple[str, str]]) -> set[str]:
    """Return the settings of a section that nothing reads."""
    owners = CALLED[section]
    seen = {name for owner, name in read if owner in owners}
    of_config = {"window", "decay_steps", "computes_reference_once"}  # properties of `Config`
    seen |= of_config & {name for owner, name in read if owner == "config"}
    if section is MeshConfig:  # `sizes_of` reads every axis; an axis has an effect if a rule names it
        seen |= {axis for axes in RULES.values() for axis in axes}
    replaced = {setting for derived in seen & DERIVED.keys() for setting in DERIVED[derived]}
    return {f.name for f in fields(section)} - seen - replaced


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_read(section: type) -> None:
    assert unread(section, read_in_package()) == set()


def test_a_setting_that_nothing_reads_is_found() -> None:
    """It is found even if a different object has an attribute of its name, or it is only written or named in a string."""
    source = "x = jnp.linalg.norm(y)\nself.config.norm_eps = 'c.norm_eps'\nz = config.model.n_layer + c.kv_heads"
    read = attributes(source)
    assert {"norm", "norm_eps", "n_head"} <= unread(ModelConfig, read)
    assert not {"n_layer", "n_kv_head"} & unread(ModelConfig, read)
    assert unread(ModelConfig, read | {("c", "norm")}) == unread(ModelConfig, read) - {"norm"}


LIMITED = [
    pytest.param(section, f, id=f"{section.__name__}.{f.name}")
    for section in (*SECTIONS[:-1], LoraConfig, TextParams, SamplingParams, BeamParams)
    for f in fields(section)
    if type(f.default) in (int, float)
]


@pytest.mark.parametrize(("section", "f"), LIMITED)
def test_limits_are_enforced_at_both_ends(section: type, f: Field[Any]) -> None:
    """The error for a value outside has name and value. Values at the limits pass this check, but may fail others."""
    name = f"{section.prefix}.{f.name}" if section.prefix else f.name
    low, high, above, below = f.metadata["limits"]
    if type(f.default) is int:
        outside = [x for x in (low - 1, high + 1, above, below) if abs(x) < inf]
    else:
        outside = [nextafter(low, -inf), nextafter(high, inf), above, below, nan]
    for value in outside:
        with pytest.raises(UserError, match=rf"^{name} must be .*, not {re.escape(repr(value))}$"):
            section(**{f.name: value})
    for value in {x for x in (low, high, f.default) if abs(x) < inf}:
        try:
            assert getattr(section(**{f.name: value}), f.name) == value
        except UserError as e:
            assert not re.match(rf"{name} must be (at|above|below)", str(e))


@pytest.mark.parametrize(
    ("value", "low", "high", "allowed"),
    [
        (5, 2_000_000, 3_000_000, "at least 2000000"),
        (5_000_000, 2_000_000, 3_000_000, "at most 3000000"),
        (5, -3_000_000, -2_000_000, "at most -2000000"),
        (-5_000_000, -3_000_000, -2_000_000, "at least -3000000"),
    ],
)
def test_large_limits_are_enforced_and_shown_if_violated(value: int, low: int, high: int, allowed: str) -> None:
    with pytest.raises(UserError, match=f"^n must be {allowed}, not {value}$"):
        as_int("n", value, low, high)


def test_numbers_of_numpy_are_converted() -> None:
    """Equal settings share a compiled program."""
    converted = SamplingParams(np.float32(0.5), np.int64(3), np.array(1))  # type: ignore[arg-type]
    assert converted == SamplingParams(0.5, 3, 1.0)
    assert [type(x) for x in (converted.temperature, converted.top_k, converted.top_p)] == [float, int, float]


def test_lists_of_strings_become_tuples() -> None:
    """Settings are hashable, so that equal settings share a compiled program."""
    converted = DataConfig(mix=["a=1"])  # type: ignore[arg-type]
    expected = DataConfig(mix=("a=1",))
    assert converted == expected
    assert hash(converted) == hash(expected)


def test_an_unknown_setting_has_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"ModelConfig has no setting 'n_layers' \(did you mean n_layer\?\)"):
        ModelConfig(n_layers=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("given", [{"length_penalty": 2.0}, {"early_stopping": True}, {"early_stopping": "never"}])
def test_settings_of_beams_have_no_effect_without_beams(given: Any) -> None:
    with pytest.raises(UserError, match="has no effect without beams: omit it, or raise num_beams above 1"):
        BeamParams(**given)


@pytest.mark.parametrize("value", [1, 0, "maybe", None])
def test_early_stopping_is_a_bool_or_never(value: Any) -> None:
    """1 equals True, and equal settings share a compiled program."""
    with pytest.raises(UserError, match="early_stopping must be true, false or never"):
        BeamParams(num_beams=2, early_stopping=value)
