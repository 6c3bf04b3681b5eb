"""Parts of a run that are given in Python. Checkpoints record their names; a resumed run must receive them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import optax

from jaxgpt.checkpoint.info import About, FrozenPart, Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config, ModelConfig, PostConfig
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.scan import ScannedGPT
from jaxgpt.ops import Ops
from jaxgpt.train.loss import Objective
from jaxgpt.trainer.evaluators import Evaluator, NamedRanking

OF_BUILD = ("model", "objective", "optimizer")  # arguments of `build`; the other parts are fields of `Start`


class RunParts(NamedTuple):
    """The parts of a run that the settings do not determine, and a resumed run must receive again.

    Attributes:
        given: names of the parts that are given in Python, keyed by part.
        has_evaluators: whether evaluators are given in Python, including evaluators with the ranking of the settings.
        checksums: SHA-256 of the frozen arrays, keyed by their names in checkpoints.
    """

    given: Mapping[str, str]
    has_evaluators: bool
    checksums: Mapping[FrozenPart, str]

    @property
    def ranked_by(self) -> str:
        """Name of the first evaluator, as `Info.ranked_by`."""
        return self.given.get("evaluators", "")

    def about(self) -> About:
        """Return the entries of these parts in a checkpoint's `Info.about`."""
        about = About()
        for part, checksum in self.checksums.items():
            about[part] = checksum
        about["given"] = self.given
        return about


@runtime_checkable
class ObjectiveOfPost(Protocol):
    """A function from a model to the objective of the settings `post`."""

    post: PostConfig


class ProgramParts(NamedTuple):
    """Parts of a program that replace the parts from the settings, as the arguments of `build` do; None: not given."""

    optimizer: optax.GradientTransformation | None = None
    frozen: Any = None
    frozen_model: ModelConfig | None = None
    model: GPT | None = None
    objective: Objective | None = None
    objective_of: Callable[[GPT], Objective] | None = None
    ops: Ops | None = None

    def names(self, config: Config) -> dict[str, str]:
        """Return the name ("": no name) of each part that a checkpoint records: a resumed run must receive it again.

        Models of the classes GPT and ScannedGPT, and an objective made from `config.post`, are omitted: the settings determine
        them.
        """
        names = {}
        if self.model is not None and type(self.model) not in (GPT, ScannedGPT):
            names["model"] = type(self.model).__name__
        if self.objective_of is not None:
            is_of_settings = isinstance(self.objective_of, ObjectiveOfPost) and self.objective_of.post == config.post
            if not is_of_settings:
                names["objective"] = ""
        elif self.objective is not None:
            names["objective"] = name_of(self.objective)
        if self.optimizer is not None:
            names["optimizer"] = ""
        return names


def name_of(value: Any) -> str:
    """Return the name of a function or class; for a `partial`, of its function; for other values, of the value's class."""
    if isinstance(value, partial):
        return name_of(value.func)
    return getattr(value, "__name__", type(value).__name__)


def ranking_of(evaluator: Evaluator, config: Config) -> str:
    """Return the name that checkpoints record for a run's first evaluator, or "" if the settings determine the ranking."""
    if not isinstance(evaluator, NamedRanking):
        return name_of(evaluator)
    default = "reward" if config.post.has_rewards else "loss"
    return "" if evaluator.ranks_by == default else evaluator.ranks_by


def check_given(run: Run, last: Info, parts: RunParts) -> None:
    """Check that a resumed run has the parts of its checkpoint `last` that were given in Python.

    Raises:
        UserError: if a part is missing.
    """
    recorded = recorded_parts(last)
    missing = {part: name for part, name in recorded.items() if part not in parts.given}
    if parts.has_evaluators:
        missing.pop("evaluators", None)
    if not missing:
        return
    names = [part if name in ("", part) else f"{part} {name}" for part, name in missing.items()]
    of_build = [f"{part}=..." for part in missing if part in OF_BUILD]
    arguments = [f"build=partial(build, {', '.join(of_build)})"] if of_build else []
    arguments += [f"{part}=..." for part in missing if part not in OF_BUILD]
    raise UserError(
        f"{run.path} was trained with parts given in Python ({', '.join(names)}), which settings cannot specify: resume "
        f'it in Python with Start(config, run="{run.path}", {", ".join(arguments)})'
    )


def changed_ranking(last: Info, parts: RunParts) -> str:
    """Return a note if a run ranks its checkpoints by a different evaluator than before the checkpoint `last`, or ""."""
    was = last.ranked_by
    now = parts.ranked_by
    if was is None or was == now:
        return ""
    default = "the evaluator of the settings"
    return (
        f"checkpoints are ranked by {now or default}, before step {last.step} by {was or default}: the search for the best "
        f"checkpoint starts again, and the earlier best checkpoint is kept"
    )


def recorded_parts(info: Info) -> Mapping[str, str]:
    """Return the parts given in Python that a checkpoint records.

    Checkpoints of older versions record only a checksum of frozen arrays: for these, the result is `frozen`, unless the
    settings determine the arrays.
    """
    if "given" in info.about:
        return info.about["given"]
    config = info.config()
    has_frozen = bool(info.about.get("base")) and not has_frozen_settings(config)
    return {"frozen": ""} if has_frozen else {}


def has_frozen_settings(config: Config) -> bool:
    """Return whether the settings determine the frozen arrays: the base of adapters, a reference or a teacher."""
    return bool(config.lora.rank) or config.post.has_reference
