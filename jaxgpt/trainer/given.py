"""Parts of a run that are given in Python: no setting determines them, so checkpoints name them, and a resume needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.scan import ScannedGPT
from jaxgpt.train.loss import Objective

OF_BUILD = ("model", "objective", "optimizer")  # arguments of `build`; others are fields of `Start`


def parts_of_build(
    config: Config,
    model: GPT | None,
    objective: Objective | None,
    objective_of: Callable[[GPT], Objective] | None,
    optimizer: Any,
) -> dict[str, str]:
    """Return the name of each part of a program that is given in Python; arguments as for `build`.

    A plain GPT is the model of the settings, and an objective made from `config.post` is the objective of the settings.
    """
    given = {}
    if model is not None and type(model) not in (GPT, ScannedGPT):
        given["model"] = type(model).__name__
    if objective_of is not None:
        if getattr(objective_of, "post", None) != config.post:
            given["objective"] = ""
    elif objective is not None:
        given["objective"] = name_of(objective)
    if optimizer is not None:
        given["optimizer"] = ""
    return given


def name_of(value: Any) -> str:
    """Return the name of a function or class, otherwise the name of its class."""
    if isinstance(value, partial):
        return name_of(value.func)
    return getattr(value, "__name__", type(value).__name__)


def ranking_of(evaluator: Any, config: Config) -> str:
    """Return the name of a first evaluator that is given in Python, or "" if the settings determine the ranking."""
    of_settings = "reward" if config.post.has_rewards else "loss"
    ranks_by = getattr(evaluator, "ranks_by", "")
    if ranks_by == of_settings:
        return ""
    return ranks_by or name_of(evaluator)


def check_given(run: Run, last: Info, given: Mapping[str, str], evaluators: Any) -> str:
    """Check that a resumed run has the parts of its checkpoint `last` that were given in Python.

    Args:
        run: the resumed run.
        last: the checkpoint that it resumes from.
        given: names of the parts of the resumed run that are given in Python.
        evaluators: evaluators of the resumed run; empty: from the settings.

    Returns:
        A note if the checkpoints are ranked by a different evaluator than before, otherwise "".

    Raises:
        UserError: if a part is missing.
    """
    recorded = recorded_parts(last)
    missing = {part: name for part, name in recorded.items() if part not in given}
    if evaluators:
        missing.pop("evaluators", None)
    if missing:
        names = [part if name in ("", part) else f"{part} {name}" for part, name in missing.items()]
        of_build = [f"{part}=..." for part in missing if part in OF_BUILD]
        arguments = [f"build=partial(build, {', '.join(of_build)})"] if of_build else []
        arguments += [f"{part}=..." for part in missing if part not in OF_BUILD]
        raise UserError(
            f"{run.path} was trained with parts given in Python ({', '.join(names)}), which settings cannot specify: resume "
            f'it in Python with Start(config, run="{run.path}", {", ".join(arguments)})'
        )

    was = last.ranking
    now = given.get("evaluators", "")
    if was is None or was == now:
        return ""
    default = "the evaluator of the settings"
    return (
        f"checkpoints are ranked by {now or default}, before step {last.step} by {was or default}: the search for the best "
        f"checkpoint starts again, and the earlier best checkpoint is kept"
    )


def recorded_parts(info: Info) -> Mapping[str, str]:
    """Return the parts of a checkpoint given in Python; older versions recorded only the checksum of frozen arrays."""
    if "given" in info.about:
        given: Mapping[str, str] = info.about["given"]
        return given
    config = info.config()
    has_frozen = bool(info.about.get("base")) and not of_settings(config)
    return {"frozen": ""} if has_frozen else {}


def of_settings(config: Config) -> bool:
    """Return whether the settings determine the frozen arrays: the base of adapters, a reference or a teacher."""
    return bool(config.lora.rank) or config.post.has_reference
