"""The state before the first step of a process: from a checkpoint of the run, from a different run, or new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxgpt.checkpoint import store
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.intact import find_damage
from jaxgpt.checkpoint.run import Run
from jaxgpt.errors import UserError
from jaxgpt.train.schedule import restart_schedules
from jaxgpt.train.skip import init_statistics
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.states import compute, copy_params, put_stacked
from jaxgpt.trainer.weights import InitialWeights


def starting_state(program: Program, run: Run, last: Info | None, weights: InitialWeights) -> TrainState:
    """Return the state before the first step: from the checkpoint `last`, from a different run, or new."""
    if last:
        return program.restore(run.checkpoints, last.step)
    if weights.state:
        return restarted_state(program, weights.state)
    if weights.initial:
        return program.init(weights.initial.read(program.place), donate=True)
    return program.init()


def restarted_state(program: Program, checkpoint: Path) -> TrainState:
    """Restore a checkpoint of a different run as the state before step 0.

    Weights, EMA and moments are kept; steps, learning-rate schedule and statistics of skipped updates start again. An EMA
    that the checkpoint lacks starts at its weights.

    Raises:
        UserError: if the checkpoint is damaged or does not match the config.
    """
    damage = find_damage(checkpoint)
    if damage:
        fix = "choose a different step, or omit --keep-optimizer"
        raise UserError(f"checkpoint {checkpoint} is damaged: {damage}; {fix}")
    mesh = program.mesh
    abstract = program.abstract

    # Read neither the statistics, which start again, nor an EMA that the checkpoint lacks.
    unread: dict[str, Any] = {"skip": None}
    if not (checkpoint / "ema").is_dir():
        unread["ema"] = None
    stored = abstract.checkpoint._replace(**unread)
    like = abstract.state._replace(**unread)

    # Only the step and the counts of the schedules are new arrays. The other restored arrays are copied only to stack layers.
    state = store.restore(checkpoint.parent, int(checkpoint.name), stored)
    state = state._replace(step=jnp.zeros_like(state.step), opt_state=restart_schedules(state.opt_state))
    state = put_stacked(program.config, state, like, donate=True)

    # Add the EMA that the checkpoint lacks, and new statistics of updates, if the run needs them.
    if abstract.state.ema is not None and state.ema is None:
        average = copy_params(mesh, state.params, like.params)
        state = state._replace(ema=average)
    if abstract.state.skip is not None:
        statistics = compute(mesh, lambda _: init_statistics(), (), abstract.state.skip)
        state = state._replace(skip=statistics)
    return state
