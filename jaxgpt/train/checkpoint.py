"""States on disk, through Orbax: the only file that knows it.

`checkpoints/<step>/` appears whole or not at all. Kept are the last two steps and the one with the lowest validation loss.
Weights, average and optimizer lie side by side, so that sampling reads only what it needs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from jaxgpt.config import UserError
from jaxgpt.train.step import TrainState

logging.getLogger("absl").setLevel(logging.ERROR)

FORMAT = 1
MARKERS = ("commit_success.txt", "_CHECKPOINT_METADATA", "params/_METADATA")


class Checkpoints:
    """The writer of a run's checkpoints. Use as a context manager: leaving it waits for the last write."""

    def __init__(self, directory: Path) -> None:
        policies = ocp.training.preservation_policies
        self.directory = directory
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(2),
                    policies.BestN(
                        get_metric_fn=lambda metrics: metrics["val_loss"],
                        reverse=True,
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
            cleanup_tmp_directories=True,
            custom_metadata={"jaxgpt_format": FORMAT},
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def save(self, state: TrainState, val_loss: float | None, metadata: Mapping[str, Any]) -> None:
        """Write a state in the background; the state may be used up at once. Raises RuntimeError if it was refused."""
        step = int(state.step)
        parts = {"params": state.params}
        if state.opt_state is not None:  # an imported model has none
            parts["opt_state"] = state.opt_state
        if state.ema is not None:
            parts["ema"] = state.ema
        metrics = None if val_loss is None else {"val_loss": val_loss}
        saved = self._checkpointer.save_checkpointables_async(
            step, parts, metrics=metrics, custom_metadata=dict(metadata), force=True
        )
        if saved is None:
            raise RuntimeError(f"checkpoint of step {step} was refused: {self.directory} holds a later one")

    def wait(self) -> None:
        """Until everything is on disk."""
        self._checkpointer.wait()


def save_params(directory: Path, params: Any, metadata: Mapping[str, Any]) -> None:
    """Weights that come from elsewhere as the checkpoint of step 0, written with little memory besides them."""
    options = ocp.Context()
    # Written as they are, from where they are: compressing copies them first, and saves 8 % of random numbers.
    options.array.saving.use_compression = False
    options.memory.deepcopy_host_arrays = False  # nobody changes them meanwhile
    with options, Checkpoints(directory) as checkpoints:
        checkpoints.save(TrainState(jnp.zeros((), jnp.int32), params, None, None), None, metadata)


def steps(directory: Path) -> list[int]:
    """Steps with a whole checkpoint, ascending. What was cut off while it was written or copied is not among them."""
    if not directory.is_dir():
        return []
    whole = (p for p in directory.iterdir() if p.name.isdecimal() and all((p / m).is_file() for m in MARKERS))
    return sorted(int(p.name) for p in whole)


def val_losses(directory: Path) -> dict[int, float]:
    """Validation loss of the steps that have one."""
    losses = {}
    for step in steps(directory):
        path = directory / str(step) / "metrics" / "metrics"
        if path.is_file():
            losses[step] = float(json.loads(path.read_text())["val_loss"])
    return losses


def choose(directory: Path, which: str) -> int:
    """The step that `last`, `best` (lowest validation loss; last where none is known) or a number means.

    Raises:
        UserError: there is no such checkpoint.
    """
    there = steps(directory)
    if not there:
        raise UserError(f"no whole checkpoint in {directory}: a run writes its first at its first evaluation")
    if which == "last":
        return there[-1]
    if which == "best":
        losses = val_losses(directory)
        return min(losses, key=losses.__getitem__) if losses else there[-1]
    if which.isdecimal() and int(which) in there:
        return int(which)
    raise UserError(f"no checkpoint {which!r} in {directory}: best, last or one of {', '.join(map(str, there))}")


def restore_state(directory: Path, step: int, abstract: TrainState) -> TrainState:
    """A whole state, placed as `abstract` says."""
    parts = {"params": abstract.params, "opt_state": abstract.opt_state}
    if abstract.ema is not None:
        parts["ema"] = abstract.ema
    loaded = _load(directory / str(step), parts)
    count = jax.device_put(jnp.asarray(step, jnp.int32), abstract.step.sharding)
    return TrainState(count, loaded["params"], loaded["opt_state"], loaded.get("ema"))


def restore_params(directory: Path, step: int, abstract: Any, ema: bool) -> Any:
    """Only the weights, or their average."""
    part = "ema" if ema else "params"
    return _load(directory / str(step), {part: abstract})[part]


def _load(path: Path, parts: dict[str, Any]) -> dict[str, Any]:
    try:
        return ocp.load_checkpointables(path.absolute(), parts)
    except Exception as e:
        reason = " ".join(str(e).split())[:200]
        raise UserError(f"{path} cannot be read as a checkpoint of this run ({type(e).__name__}: {reason})") from None
