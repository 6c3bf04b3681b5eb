"""Write and read `metrics.jsonl`, one JSON object per line; count parameters, FLOPs and bytes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import flax
import jax

import jaxgpt
from jaxgpt.checkpoint.store import Info
from jaxgpt.config import Config, LoraConfig, ModelConfig, changes
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json, write_atomically
from jaxgpt.model.lora import abstract_trained
from jaxgpt.model.params import weight_at
from jaxgpt.parallel.processes import is_leader
from jaxgpt.train.optimizer import make_optimizer


class MetricsFile:
    """Append lines to a metrics file and flush each. Only process 0 writes. Use as a context manager.

    Attributes:
        elapsed_seconds: training time up to the last kept line; 0 in a new file.
    """

    def __init__(self, path: Path, last: Info | None = None) -> None:
        """Start a new file, or continue a file from its last checkpoint and drop later lines."""
        path = path if is_leader() else Path(os.devnull)
        self.elapsed_seconds = 0.0
        if last is not None and path.is_file():
            kept = [line for line in read_metrics(path) if _before(line, last.step)]
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
            self.elapsed_seconds = max((line.get("elapsed_seconds", 0.0) for line in kept), default=0.0)
        self._file = path.open("a" if last else "w")

    def write(self, **values: Any) -> None:
        """Write a line without non-finite values, which JSON cannot represent."""
        line = {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a metrics file, skipping truncated and damaged ones."""
    with path.open("rb") as f:
        for line in f:
            try:
                value = parse_json(line, str(path))
            except UserError:
                continue
            if not isinstance(value, dict) or type(value.get("step")) is not int or value["step"] < 0:
                continue
            numbers = (value.get(name, 0) for name in ("loss", "val_loss", "tokens", "elapsed_seconds"))
            if all(type(number) in (int, float) for number in numbers) and isinstance(value.get("changed", {}), dict):
                yield value


def _before(line: dict[str, Any], step: int) -> bool:
    # A line with the loss of step s is written after its update, one with val_loss before the checkpoint of step s.
    return line["step"] < step or (line["step"] == step and "loss" not in line)


def start_line(config: Config, last: Info | None) -> dict[str, Any]:
    """Return the line that records a start of the run: date, command, machine, versions, and settings changed since `last`."""
    return {
        "step": last.step if last else 0,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "commit": _commit(),
        "host": platform.node(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": versions(),
        "changed": changes(last.config(), config) if last else {},
    }


def versions() -> dict[str, str]:
    """Return the versions that a run depends on, and a digest of this package: checkouts can have equal version numbers."""
    files = sorted(Path(jaxgpt.__file__).parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return {
        "jaxgpt": jaxgpt.__version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "code": code.hexdigest()[:16],
    }


def _commit() -> str:
    """Return the git commit of the current directory, with -dirty if files have changed; "" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""


def parameter_count(params: Any) -> int:
    """Count the parameters of a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def parameter_table(params: Any) -> dict[str, int]:
    """Count the parameters of every module, by path, including its submodules."""
    table: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [key.key for key in path]
        for depth in range(1, len(names)):
            module = "/".join(names[:depth])
            table[module] = table.get(module, 0) + leaf.size
    return table


def multiplied_parameters(config: ModelConfig, params: Any) -> int:
    """Count the parameters in matrix products: matrices, and the table of a tied head."""
    kinds = ("matrix", "table") if config.tie_embeddings else ("matrix",)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(leaf.size for path, leaf in leaves if (w := weight_at(path, config)) and w.kind in kinds)


def flops_per_token(config: ModelConfig, params: Any, T: int, lora: LoraConfig | None = None) -> int:
    """Compute the floating-point operations of training on one token: `6 P + 12 L N H T`.

    P: parameters in matrix products, 2 operations forward and 4 backward. The second term is attention over T tokens,
    without a deduction for the causal mask (PaLM, appendix B). With adapters `4 P + 2 P_a` replaces `6 P`: of the weights, only
    the adapted matrices, with P_a parameters, have a gradient.
    """
    count = gradients = multiplied_parameters(config, params)
    if lora is not None and lora.rank:
        names = lora.targets.replace("+", ",").split(",")
        leaves = jax.tree_util.tree_leaves_with_path(params)
        gradients = sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel" and path[-2].key in names)
    attention = 12 * config.n_layer * config.n_head * config.head_width * T
    return 4 * count + 2 * gradients + attention


def state_bytes(config: Config, params: Any) -> dict[str, int]:
    """Compute the bytes of a training state and its gradients by kind, over all devices, from weights or their shapes."""
    trained = abstract_trained(config.model, config.lora)
    trees = {"parameters": (params, trained) if config.lora.rank else params, "gradients": trained}
    trees["optimizer"] = jax.eval_shape(make_optimizer(config).init, trained)
    trees |= {"average": trained} if config.optim.ema_decay > 0 else {}
    bytes_of = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    return {kind: bytes_of(tree) for kind, tree in trees.items()}
