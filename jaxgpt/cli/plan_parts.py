"""The parts of a plan: estimates, compiled programs, and advice for a run that does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.cli.console import progress
from jaxgpt.cli.plan_case import Case

if TYPE_CHECKING:
    from jaxgpt.plan.cost import StepCost
    from jaxgpt.plan.fitting import Suggestion


class Plan(NamedTuple):
    """A case and the costs of its parts.

    Attributes:
        case: the run on hardware.
        estimates: estimated costs: "train", a step, and "rollout", if the model generates answers.
        programs: costs of compiled programs: "train" and, on request, "decode"; empty if nothing is compiled.
    """

    case: Case
    estimates: Mapping[str, StepCost]
    programs: Mapping[str, StepCost]

    @property
    def costs(self) -> dict[str, StepCost]:
        """The cost of each part: compiled if possible, otherwise estimated."""
        return {**self.estimates, **self.programs}

    @property
    def fits(self) -> bool:
        """Whether every part fits in memory."""
        return all(cost.fits for cost in self.costs.values())

    def to_json(self) -> dict[str, Any]:
        """Return the topology, the mesh and the costs as values for JSON."""
        topology = self.case.topology
        about = {"topology": str(topology), "mesh": asdict(self.case.config.mesh)}
        return about | {part: cost.to_json(topology.chip) for part, cost in self.costs.items()}


def estimate_parts(case: Case) -> dict[str, StepCost]:
    """Estimate the training step and, if the model generates answers, the rollout."""
    from jaxgpt.plan.estimate import estimate
    from jaxgpt.plan.rollout import rollout

    with progress("estimating"):
        costs = {"train": estimate(case.config, case.topology, case.work)}
        if case.work.answers:
            costs["rollout"] = rollout(case.config, case.topology, case.work)
    return costs


def compile_programs(case: Case, decode: bool) -> dict[str, StepCost]:
    """Compile the training step and, with `decode`, a decoding step."""
    from jaxgpt.plan.decode import compile_decode
    from jaxgpt.plan.train_step import compile_step

    with progress("compiling the training step"):
        costs: dict[str, StepCost] = {"train": compile_step(case.config, case.topology, work=case.work)}
    if decode:
        with progress("compiling the sampler"):
            costs["decode"] = compile_decode(case.config, case.topology)
    return costs


def why_not_compiled(cases: Sequence[Case], estimate: bool) -> str:
    """Return why plans are not compiled (with `estimate`, or without a compiler), or "" if they can be compiled."""
    from jaxgpt.plan.compilers import compiler_missing

    if estimate:
        return "--estimate is given; omit it to compile"
    reasons = (compiler_missing(case.topology) for case in cases)
    return next(filter(None, reasons), "")


class Advice(NamedTuple):
    """Ways to make a run fit.

    Attributes:
        hints: options that need less memory.
        larger: a line about the smallest slice that fits, or that no slice fits; "": the run or a hint fits.
    """

    hints: Sequence[Suggestion] = ()
    larger: str = ""


def find_advice(case: Case) -> Advice:
    """Find options to reduce the memory of a run, and a larger slice if no option suffices."""
    from jaxgpt.plan.fitting import suggestions

    hints = suggestions(case.config, case.topology, case.work)
    is_enough = any(hint.total <= case.topology.chip.hbm for hint in hints)
    return Advice(hints, "" if is_enough else larger_slice(case))


def larger_slice(case: Case) -> str:
    """Describe the smallest slice with enough memory for a run, if no option makes the run fit on its own slice."""
    from jaxgpt.plan.fitting import smallest_slice

    found = smallest_slice(case.config, case.topology, case.work)
    if found is None:
        return f"Nothing fits on {case.topology}, or on a larger slice of {case.topology.chip.title}."
    slice_, flags = found
    return f"Nothing fits on {case.topology}. The smallest slice that fits: --topology {slice_} {flags}"
