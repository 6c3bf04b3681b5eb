"""Write weights as a checkpoint one array at a time.

Orbax writes a complete tree in one call. Here it writes a tree of arrays with a single element each. Then TensorStore, which
stores Orbax's arrays, replaces each array with its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.checkpoint.index import PARTIAL
from jaxgpt.checkpoint.info import About, Info
from jaxgpt.checkpoint.saver import commit, failed_writes
from jaxgpt.checkpoint.store import check_shapes, import_orbax
from jaxgpt.model.params import flatten_params

# Target size of a chunk, the unit of reading, in bytes. A chunk has one or more complete rows. With smaller chunks, a
# device reads less data outside its shard.
CHUNK = 2**24
# Compression would be slow, and save only 8% of the space.
UNCOMPRESSED = [{"name": "bytes", "configuration": {"endian": "little"}}]


def stream_params(directory: Path, like: Any, arrays: Iterable[tuple[str, np.ndarray]], about: About) -> None:
    """Write weights without optimizer state as the checkpoint of step 0, holding one array at a time.

    Args:
        directory: directory of the checkpoints.
        like: shapes and dtypes of the weights.
        arrays: path of every weight, such as "h_0/attn/q_proj/kernel", and its values; may be a generator.
        about: facts for checkpoint.json, as in `Info`.

    Raises:
        ValueError: if the paths or shapes of `arrays` differ from `like`.
        TrainingFailed: if the checkpoint cannot be written, for example because the disk is full.
    """
    ocp = import_orbax()

    path = directory.resolve() / f"0{PARTIAL}"  # TensorStore rejects `..` in paths
    placeholders = jax.tree.map(lambda leaf: np.zeros((1,) * len(leaf.shape), leaf.dtype), like)
    with failed_writes():
        ocp.save_checkpointables(path, {"params": placeholders})
    _replace_arrays(path / "params", set(flatten_params(like)), arrays)

    # This fails if a version of Orbax stores arrays in a different place.
    check_shapes(ocp.checkpointables_metadata(path).metadata["params"], like)
    with failed_writes():
        commit(path, Info(0, about=about))


def _replace_arrays(part: Path, names: Set[str], arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write arrays over the placeholders in a part of a checkpoint; raise `ValueError` unless each name occurs once."""
    missing = set(names)
    for name, array in arrays:
        if name not in names:
            raise ValueError(f"the model has no weight {name}: omit it")
        if name not in missing:
            raise ValueError(f"the weight {name} occurs twice: pass it once")
        with failed_writes():
            _write_array(part, name, array)
        missing.remove(name)
    if missing:
        raise ValueError(f"no values for the weights {', '.join(sorted(missing))}: pass an array of each")


def _write_array(part: Path, name: str, array: np.ndarray) -> None:
    """Replace an array in the database of a part of a checkpoint, in chunks of complete rows."""
    import tensorstore

    row_bytes = max(math.prod(array.shape[1:]) * array.itemsize, 1)
    rows = max(min(CHUNK // row_bytes, array.shape[0]), 1)
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{part}/"},
            "path": f"{name.replace('/', '.')}/",
        },
        "metadata": {
            "shape": array.shape,
            "data_type": str(array.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [rows, *array.shape[1:]]}},
            "codecs": UNCOMPRESSED,
        },
        "store_data_equal_to_fill_value": True,  # Orbax rejects a missing chunk, even if all its values are 0
    }
    store = tensorstore.open(spec, create=True, delete_existing=True).result()
    store.write(array).result()
