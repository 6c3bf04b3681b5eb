"""Draw docs/img/shardings.png: the shards of three arrays on eight devices, for three meshes.

python docs/tools/shardings.py docs/img/shardings.png
"""

from __future__ import annotations

import sys

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from jax.sharding import NamedSharding
from matplotlib.patches import Rectangle

from jaxgpt.config import MeshConfig
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import RULES, partition_spec

ARRAYS = {
    "batch: rows x tokens": ("batch", "length"),
    "MLP kernel: width x MLP": ("embed", "mlp"),
    "token table: vocabulary x width": ("vocab", "embed"),
}
MESHES = {
    "data 8": MeshConfig(data=8),
    "fsdp 8": MeshConfig(data=1, fsdp=8),
    "data 2 x fsdp 2 x tensor 2": MeshConfig(data=2, fsdp=2, tensor=2),
}
SIDE = 8  # rows and columns of each array, a multiple of the number of devices


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    fig, axes = plt.subplots(len(MESHES), len(ARRAYS), figsize=(8, 8.6), constrained_layout=True)
    for row, (mesh_name, config) in enumerate(MESHES.items()):
        mesh = make_mesh(config)
        for column, (array_name, names) in enumerate(ARRAYS.items()):
            ax = axes[row, column]
            parts: dict[tuple[int, int, int, int], list[int]] = {}
            places = NamedSharding(mesh, partition_spec(names, RULES)).devices_indices_map((SIDE, SIDE))
            for device, (rows, columns) in places.items():
                (top, bottom, _), (left, right, _) = rows.indices(SIDE), columns.indices(SIDE)
                parts.setdefault((left, top, right - left, bottom - top), []).append(device.id)
            for (left, top, width, height), ids in parts.items():
                color = plt.get_cmap("tab20c")(min(ids) / 8)
                ax.add_patch(Rectangle((left, top), width, height, facecolor=color, edgecolor="white", linewidth=2))
                label = "0 .. 7" if len(ids) == 8 else " ".join(map(str, ids))
                ax.text(left + width / 2, top + height / 2, label, ha="center", va="center", fontsize=9)
            ax.set(xlim=(0, SIDE), ylim=(SIDE, 0), xticks=[], yticks=[], aspect="equal")
            ax.set_title(array_name if row == 0 else "", fontsize=9)
            ax.set_ylabel(mesh_name if column == 0 else "", fontsize=9)
    fig.savefig(sys.argv[1], dpi=80)


if __name__ == "__main__":
    main()
