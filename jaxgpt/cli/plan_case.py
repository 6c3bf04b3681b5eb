"""The case of a plan: the settings of a run on hardware, from the target and the options of `jaxgpt plan`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.cli.options import NO_SETTINGS, GivenSettings
from jaxgpt.cli.parse import parse_options
from jaxgpt.cli.settings import given_model, named_config, with_settings, with_vocab
from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.presets import PRESETS
from jaxgpt.suggestions import did_you_mean

if TYPE_CHECKING:
    from jaxgpt.plan.topology import Topology
    from jaxgpt.plan.work import Work

AGAINST = '--against takes settings, --topology and --slices in quotes, such as "--mesh.tensor 4"'


class Case(NamedTuple):
    """The subject of a plan: a run on hardware."""

    title: str  # preset, shape or run
    config: Config  # settings of a step, with a resolved mesh
    topology: Topology
    work: Work
    objective: str  # name of the objective, for the user
    steps: int  # steps of the run; 0: unknown
    attention: str  # description of the attention kernel, for the user
    remark: str  # note on the mesh, or ""


def make_case(target: str, topology: str, slices: int, settings: Mapping[str, Any]) -> Case:
    """Resolve the settings of a plan; raise `UserError` if they are invalid."""
    from jaxgpt.plan.attention import attention_of
    from jaxgpt.plan.estimate import resolve_mesh
    from jaxgpt.plan.shapes import SHAPES
    from jaxgpt.plan.topology import parse_topology
    from jaxgpt.post.plan import work_of

    config = with_vocab(with_settings(_base(target), settings))
    if config.train.epochs:
        raise UserError(
            f"train.epochs {config.train.epochs:g} needs the number of tokens, which plan does not count: "
            "use --train.steps N --train.epochs 0"
        )
    has_steps = target not in SHAPES or "train.steps" in settings

    chips = parse_topology(topology, slices)
    config, remark = resolve_mesh(config, chips)
    step_config, work = work_of(config)
    return Case(
        title=target,
        config=step_config,
        topology=chips,
        work=work,
        objective=_objective(config),
        steps=config.train.steps if has_steps else 0,
        attention=attention_of(config, chips),
        remark=remark,
    )


def _objective(config: Config) -> str:
    """Describe the objective: its name, and its teacher or, on preference pairs, the time of computing its reference."""
    post = config.post
    if post.is_distillation:
        return f"{post.objective}, teacher {post.reference}"
    if not (post.is_preference and post.has_reference):
        return post.objective
    if config.computes_reference_once:
        return f"{post.objective}; the reference is computed once for each pair, before training"
    return f"{post.objective}; the reference is computed in each step"


def other_case(target: str, topology: str, slices: int, settings: Mapping[str, Any], against: str) -> Case:
    """Resolve the settings of a plan with the further options of --against.

    Args:
        target: target of both plans.
        topology: topology, unless `against` has --topology.
        slices: number of slices, unless `against` has --slices.
        settings: settings of the first plan, which the settings in `against` override.
        against: options as on a command line, such as `--mesh.tensor 4`.

    Raises:
        UserError: if `against` is empty, or an option is unknown or invalid.
    """
    try:
        words = shlex.split(against)
    except ValueError as e:
        raise UserError(f"--against {against!r}: {e}") from None
    if not words:
        raise UserError(AGAINST)
    try:
        changes = parse_options(_changes, words)
    except UserError as e:
        raise UserError(f"{AGAINST}: {e}") from None
    return make_case(
        target,
        topology=changes.get("topology", topology),
        slices=changes.get("slices", slices),
        settings={**settings, **changes.get("settings", {})},
    )


def _changes(*, topology: str = "", slices: int = 1, settings: GivenSettings = NO_SETTINGS) -> None:
    """Declare the options of --against for the parser: the hardware and the settings of a plan."""


def _base(target: str) -> Config:
    """Return the config of a preset, shape, run or file; raise `UserError` if it is missing or has a model given in Python."""
    from jaxgpt.plan.shapes import SHAPES, shape_config

    if target in SHAPES:
        return shape_config(target)
    is_known = target in PRESETS or Path(target).exists()
    near = did_you_mean(target, SHAPES)
    if near and not is_known:
        raise UserError(f"no preset, architecture, run or file {target!r}{near}")
    config = named_config(target)
    model = given_model(target)
    if model:
        raise UserError(
            f"{target} was trained with the model {model}, given in Python: plan it in Python, with "
            f"jaxgpt.plan.train_step.compile_step"
        )
    return config
