"""Write and read checkpoints with Orbax.

`checkpoints/<step>/` appears complete, with the checksums of its files, or not at all. Weights, average and optimizer state are
separate parts, so that sampling reads only the weights. index.py lists and checks the checkpoints of a run.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxgpt.checkpoint import manifest
from jaxgpt.checkpoint.eventloop import loops_that_finish
from jaxgpt.checkpoint.index import COMMIT, METADATA, METRICS, damage, resolve_step, steps, val_losses
from jaxgpt.checkpoint.run import check_path
from jaxgpt.config import UserError
from jaxgpt.errors import TrainingFailed
from jaxgpt.files import read_json, write_atomically
from jaxgpt.parallel.processes import is_peer_failure, on_leader

if TYPE_CHECKING:  # imported where a state is made: who reads weights needs no optimizer, and no optax
    from jaxgpt.train.step import TrainState

__all__ = ["Checkpoints", "read_params", "resolve_step", "restore_params", "restore_state", "save_params", "steps"]
__all__ += ["val_losses"]

# Orbax reports errors as exceptions as well.
logging.getLogger("absl").setLevel(logging.CRITICAL)

FORMAT = 2
LATE = (METADATA, COMMIT)  # files that Orbax writes after the others


class Keep:
    """Decide which checkpoints are kept: the last n, the best n by validation loss, every n steps, and always the newest.

    A temporary checkpoint is kept until the next one is written, and is not counted.
    """

    def __init__(self, last: int = 2, best: int = 1, every: int = 0) -> None:
        policies = ocp.training.preservation_policies
        rules: list[Any] = [
            policies.LatestN(last),
            policies.BestN(
                get_metric_fn=lambda metrics: metrics["val_loss"],
                reverse=True,
                n=best,
                keep_checkpoints_without_metrics=False,
            ),
        ]
        self.rule = policies.AnyPreservationPolicy(rules + ([policies.EveryNSteps(every)] if every else []))

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Implement Orbax's preservation policy."""
        lasting = [c for c in checkpoints if not (c.metrics and c.metrics.get("temporary"))]
        kept = {
            c.step for c, keep in zip(lasting, self.rule.should_preserve(lasting, context=context), strict=True) if keep
        }
        return [c is checkpoints[-1] or c.step in kept for c in checkpoints]


class Checkpoints:
    """The writer of a run's checkpoints. Use as a context manager: leaving it waits for the last write."""

    def __init__(self, directory: Path, keep: Keep | None = None, options: ocp.Context | None = None) -> None:
        check_path(directory)
        self.directory = directory
        self._options = ocp.Context(options)
        self._unsealed: tuple[int, dict[str, str]] | None = None
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=keep or Keep(),
            cleanup_tmp_directories=True,
            custom_metadata={"jaxgpt_format": FORMAT},
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except TrainingFailed:
            if kind is None:  # otherwise the first error is reported
                raise
        finally:
            self._checkpointer.close()

    def save(
        self, state: TrainState, val_loss: float | None, metadata: Mapping[str, Any], *, temporary: bool = False
    ) -> None:
        """Write a state in the background. The state may be donated as soon as this returns.

        Raises:
            TrainingFailed: the previous checkpoint could not be written, or a later one exists.
        """
        step = int(state.step)
        self.wait()
        parts = {"params": state.params}
        if state.opt_state is not None:  # an imported model has none
            parts["opt_state"] = state.opt_state
        if state.ema is not None:
            parts["ema"] = state.ema
        metrics = {"temporary": True} if temporary else None if val_loss is None else {"val_loss": val_loss}
        options = ocp.Context(self._options)
        options.async_options.post_finalization_callback = partial(self._list, step)
        try:
            with options:
                saved = self._checkpointer.save_checkpointables_async(
                    step, parts, metrics=metrics, custom_metadata={"manifest": True, **metadata}, force=True
                )
        except Exception as e:
            raise TrainingFailed(f"checkpoint of step {step} could not be written ({_reason(e)})") from None
        if saved is None:
            raise TrainingFailed(f"checkpoint of step {step} was refused: {self.directory} holds a later one")

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            TrainingFailed: it could not be written.
        """
        try:
            self._checkpointer.wait()
            unsealed, self._unsealed = self._unsealed, None
            if unsealed:
                step, sums = unsealed
                folder = self.directory / str(step)
                manifest.write(folder, sums | manifest.checksums(folder, LATE))
        except Exception as e:
            raise TrainingFailed(f"a checkpoint could not be written ({_reason(e)})") from None

    def note_val_loss(self, step: int, val_loss: float) -> None:
        """Record the validation loss of a checkpoint that was written before its evaluation."""
        self.wait()
        on_leader(partial(self._add_val_loss, self.directory / str(step), val_loss))
        self._checkpointer.reload()

    def _add_val_loss(self, folder: Path, val_loss: float) -> None:
        sums = manifest.read(folder)
        # In between, the file is in no manifest, so that it never contradicts one.
        manifest.write(folder, {name: digest for name, digest in sums.items() if name != METRICS})
        (folder / METRICS).parent.mkdir(exist_ok=True)
        write_atomically(folder / METRICS, json.dumps({"val_loss": val_loss}))
        manifest.write(folder, sums | manifest.checksums(folder, [METRICS]))

    def _list(self, step: int) -> None:
        """Write the manifest; called in process 0 when all have written, before the checkpoint gets its final name."""
        folder = next(self.directory.glob(f"{step}.orbax-checkpoint-tmp*"), self.directory / str(step))
        sums = manifest.checksums(folder)
        sums = {name: digest for name, digest in sums.items() if name not in LATE}
        manifest.write(folder, sums)
        self._unsealed = (step, sums)


def save_params(directory: Path, params: Any, metadata: Mapping[str, Any]) -> None:
    """Write weights without an optimizer as the checkpoint of step 0, with little additional memory."""
    from jaxgpt.train.step import TrainState

    options = ocp.Context()
    # Compression copies the weights first, and saves only 8 %.
    options.array.saving.use_compression = False
    options.memory.deepcopy_host_arrays = False  # they do not change while they are written
    with Checkpoints(directory, options=options) as checkpoints:
        checkpoints.save(TrainState(jnp.zeros((), jnp.int32), params, None, None), None, metadata)


def read_params(directory: Path, which: str, abstract: Any, ema: bool) -> tuple[Any, int]:
    """Read the weights of a checkpoint, while training may be writing newer ones and deleting this one.

    Returns:
        The weights, and the step of their checkpoint.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    while True:
        step = resolve_step(directory, which)
        try:
            return restore_params(directory, step, abstract, ema), step
        except UserError:
            if resolve_step(directory, which) == step:
                raise


def restore_state(directory: Path, step: int, abstract: TrainState) -> TrainState:
    """Read a whole state, placed as `abstract` says. Its files were checked when the step was chosen."""
    from jaxgpt.train.step import TrainState

    path = directory / str(step)
    parts = {"params": abstract.params} | ({} if abstract.ema is None else {"ema": abstract.ema})
    loaded = _load(path, parts)
    opt_state = _load_opt_state(path, abstract.opt_state, abstract.step.sharding)
    count = jax.device_put(np.int32(step), abstract.step.sharding)
    return TrainState(count, loaded["params"], opt_state, loaded.get("ema"))


def _load_opt_state(path: Path, abstract: Any, replicated: jax.sharding.Sharding) -> Any:
    """Read the state of an optimizer, also if only the saved one or only the one to restore skips bad updates.

    Older versions saved the statistics of skipped updates as a part of their own, `guard`. Without any, they start anew.
    """
    from jaxgpt.train.skip import SkipState, init_skip_state

    skips = isinstance(abstract, SkipState)
    inner = abstract.inner_state if skips else abstract
    fresh = jax.device_put(init_skip_state(None), replicated)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), fresh)
    if _saved_names(path, "opt_state") == set(SkipState._fields):
        state = _load(path, {"opt_state": like._replace(inner_state=inner)})["opt_state"]
        return state if skips else state.inner_state
    state = _load(path, {"opt_state": inner})["opt_state"]
    if skips and (path / "guard").is_dir():
        fresh = fresh._replace(statistics=_load(path, {"guard": like.statistics})["guard"])
    return fresh._replace(inner_state=state) if skips else state


def _saved_names(path: Path, part: str) -> set[str]:
    """Read the names of the children of a saved tree's root."""
    leaves = read_json(path / part / "_METADATA").get("tree_metadata", {})
    return {key["key"] for leaf in leaves.values() for key in leaf["key_metadata"][:1]}


def restore_params(directory: Path, step: int, abstract: Any, ema: bool) -> Any:
    """Read the weights, or their average, and verify their checksums.

    Raises:
        UserError: they are damaged, or of another model.
    """
    part, path = "ema" if ema else "params", directory / str(step)
    if why := damage(path, [part]):
        others = [str(other) for other in steps(directory) if other != step]
        way_out = f"try --checkpoint {others[-1]}" if others else "there is no other"
        raise UserError(f"checkpoint {path} is damaged: {why}; {way_out}")
    return _load(path, {part: abstract})[part]


def _load(path: Path, parts: dict[str, Any]) -> dict[str, Any]:
    """Read parts of a checkpoint, one call each: when one of several fails, Orbax abandons the coroutines of the others, and
    Python warns about them on standard error.
    """
    loaded: dict[str, Any] = {}
    for name, abstract in parts.items():
        try:
            with loops_that_finish():
                loaded |= ocp.load_checkpointables(path.absolute(), {name: abstract})
        except Exception as e:
            if is_peer_failure(e):
                raise
            cause = e.__cause__ or e  # Orbax's own error lists the kinds of files that it knows
            raise UserError(
                f"{path} cannot be read as a checkpoint of this run: {name} does not match the run's settings or is "
                f"damaged ({type(cause).__name__}: {_reason(cause)})"
            ) from None
    return loaded


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore's way of telling it
        return os.strerror(int(code[1]))
    return " ".join(str(error).split())[:200]
