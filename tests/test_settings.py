"""Every setting is used and has a description."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import fields
from typing import Any

import pytest
from helpers import repository

from jaxgpt.config import (
    BeamParams,
    Config,
    DataConfig,
    DistributedConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    UserError,
)

SECTIONS = (ModelConfig, DataConfig, OptimConfig, TrainConfig, MeshConfig, DistributedConfig, Config)
# What a config of each class is called where it is read. `norm` of `jnp.linalg` or `name` of a path is no setting.
CALLED: dict[type, set[str]] = {
    ModelConfig: {"model", "config", "c", "m"},
    DataConfig: {"data"},
    OptimConfig: {"optim", "o"},
    TrainConfig: {"train"},
    MeshConfig: {"mesh"},
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
    "segmented": {"documents"},
}


def attributes(source: str) -> set[tuple[str, str]]:
    """Every attribute that a module reads, with the name of what it is read from: `a.b.c` is `("b", "c")`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if isinstance(owner, ast.Name | ast.Attribute):
                found.add((owner.id if isinstance(owner, ast.Name) else owner.attr, node.attr))
    return found


@functools.cache
def read_in_package() -> set[tuple[str, str]]:
    """The attributes that the package reads, but for what declares settings and what copies them to other formats."""
    package = repository() / "jaxgpt"
    modules = [path for path in package.rglob("*.py") if path.name not in ("config.py", "presets.py")]
    return set().union(*(attributes(path.read_text()) for path in modules if path.parent.name != "convert"))


def unread(section: type, read: set[tuple[str, str]]) -> set[str]:
    """The settings of a section that nothing reads."""
    owners = CALLED[section]
    seen = {name for owner, name in read if owner in owners}
    replaced = {setting for derived in seen & DERIVED.keys() for setting in DERIVED[derived]}
    return {f.name for f in fields(section)} - seen - replaced


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_read(section: type) -> None:
    assert unread(section, read_in_package()) == set()


def test_a_setting_that_nothing_reads_is_found() -> None:
    """Also where an attribute of another object has its name, or it is only written, or stands in a string."""
    source = "x = jnp.linalg.norm(y)\nself.config.norm_eps = 'c.norm_eps'\nz = config.model.n_layer + c.kv_heads"
    read = attributes(source)
    assert {"norm", "norm_eps", "n_head"} <= unread(ModelConfig, read)
    assert not {"n_layer", "n_kv_head"} & unread(ModelConfig, read)
    assert unread(ModelConfig, read | {("c", "norm")}) == unread(ModelConfig, read) - {"norm"}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_has_a_description(section: type) -> None:
    source = (repository() / "jaxgpt/config.py").read_text()
    for f in fields(section):
        described = rf"^    ({f.name}: .*  # \S|# \S.*\n    {f.name}: )"
        assert re.search(described, source, re.M), f"{section.__name__}.{f.name} has no description"


@pytest.mark.parametrize("value", [1, 0, "maybe", None])
def test_early_stopping_is_a_bool_or_never(value: Any) -> None:
    """1 equals True, and equal settings share a compiled program."""
    with pytest.raises(UserError, match="early-stopping must be true, false or never"):
        BeamParams(num_beams=2, early_stopping=value)
