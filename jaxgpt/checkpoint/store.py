"""Checkpoints of a run: their files, and reading them; `saver.py` writes them, `index.py` lists and `intact.py` verifies them.

checkpoints/300/params/         weights or adapters; Orbax stores each part separately, so that sampling reads a single part
                opt_state/      state of the optimizer
                skip/           statistics for skipping updates, if enabled
                ema/            EMA of params, if enabled
                checkpoint.json `Info`, with the SHA-256 of every file
checkpoints/310.partial*/       checkpoint being written or deleted; a complete checkpoint is renamed to its step
checkpoints/290.damaged/        damaged checkpoints, renamed by a resume, which also deletes partial checkpoints
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from jaxgpt.checkpoint.paths import check_backslash
from jaxgpt.errors import UserError, one_line
from jaxgpt.out_of_memory import is_out_of_device_memory
from jaxgpt.parallel.processes import is_peer_failure

if TYPE_CHECKING:  # Orbax and optax: slow imports, deferred to the functions that need them
    from jaxgpt.train.step import TrainState

IN_FLIGHT = 2**26  # bytes that may be read at a time, in addition to the largest array


def import_orbax() -> Any:
    """Import Orbax on first use: the import is slow. Silence its logger (`absl`), which repeats errors that Orbax raises."""
    from orbax.checkpoint import v1

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    return v1


def restore(directory: Path, step: int, like: TrainState) -> TrainState:
    """Restore a train state with the shardings of `like`; `find_damage` must have checked the digests."""
    from jaxgpt.train.skip import init_statistics
    from jaxgpt.train.step import TrainState

    path = directory / str(step)
    sharding = like.step.sharding
    parts = {}
    for name, part in state_parts(like).items():
        if name == "skip" and not (path / name).is_dir():  # a resume has enabled skipping: no statistics yet
            parts[name] = jax.device_put(init_statistics(), sharding)
        else:
            parts[name] = _load(path, name, part)
    return TrainState(step=jax.device_put(np.int32(step), sharding), **parts)


def read_params(directory: Path, step: int, like: Any, part: str = "params") -> Any:
    """Read `part` of a checkpoint with the shardings of `like`; `resolve_weights` must have checked the digests.

    Raises:
        UserError: if the part cannot be read or has different shapes, or a training process has deleted the checkpoint.
    """
    path = directory / str(step)
    try:
        params = _load(path, part, like)
    except UserError:
        _check_not_deleted(path)
        raise
    _check_not_deleted(path)
    return params


def _check_not_deleted(path: Path) -> None:
    """Raise `UserError` if a training process has deleted a checkpoint while it was read."""
    if not path.is_dir():
        raise UserError(
            f"checkpoint {path} was deleted by the training process while it was read: run the command again"
        ) from None


def stored_weights(directory: Path, step: int, part: str = "params") -> Any:
    """Return the tree of shapes and dtypes of `part` of a checkpoint; {} if it is unreadable."""
    ocp = import_orbax()

    path = directory / str(step)
    try:
        saved = ocp.checkpointables_metadata(path.absolute()).metadata.get(part, {})
    except Exception as e:
        if is_peer_failure(e):
            raise
        return {}
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)


def state_parts(state: TrainState) -> dict[str, Any]:
    """Return the parts of a state, keyed by directory name; an imported model has only `params`."""
    return {name: part for name, part in state._asdict().items() if name != "step" and part is not None}


def _load(path: Path, part: str, like: Any) -> Any:
    """Restore a part of a checkpoint; raise `UserError` if it is unreadable or does not match `like`."""
    ocp = import_orbax()

    check_backslash(path)
    try:
        # Check shapes first: if Orbax finds a wrong shape while it reads arrays, its threads fail at process exit.
        saved = ocp.checkpointables_metadata(path.absolute()).metadata
        check_shapes(saved.get(part, {}), like)
        with _few_in_flight(like):
            return ocp.load_checkpointables(path.absolute(), {part: like})[part]
    except Exception as e:
        if is_peer_failure(e) or is_out_of_device_memory(e):
            raise
        cause = e.__cause__ or e  # the mismatch, which Orbax's error omits
        raise UserError(f"{path} is damaged or does not match the settings: {part} ({one_line(cause, 200)})") from None


def _few_in_flight(like: Any) -> AbstractContextManager[Any]:
    """Limit the bytes that Orbax reads at a time: the largest array and `IN_FLIGHT`; by default, it reads all arrays."""
    ocp = import_orbax()

    largest = max((leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like)), default=0)
    options = ocp.Context()
    options.memory.read_concurrent_bytes = largest + IN_FLIGHT
    return options


def check_shapes(saved: Any, like: Any) -> None:
    """Raise `ValueError` if an array has different shapes in two trees."""
    shapes = _shapes(saved)
    wanted = _shapes(like)
    for name in sorted(shapes.keys() & wanted.keys()):
        if shapes[name] != wanted[name]:
            raise ValueError(f"{name} has the shape {list(shapes[name])}, not {list(wanted[name])}")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of a tree, keyed by path."""
    leaves = tree_leaves_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves if hasattr(leaf, "shape")}
