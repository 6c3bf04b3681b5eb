"""jaxgpt verify [RUN|PRESET]"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.output import print_facts, print_json
from jaxgpt.cli.parse import Checkpoint, Json
from jaxgpt.cli.progress import progress
from jaxgpt.cli.settings import named_config, with_vocab
from jaxgpt.config import Config, DataConfig, MeshConfig
from jaxgpt.presets import DEFAULT, PRESETS, preset

if TYPE_CHECKING:
    from jaxgpt.lm import LM
    from jaxgpt.study.verify import LawResult

VERDICTS = {True: "ok", False: "FAILED", None: "skipped"}
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def verify(target: str = "", /, *, checkpoint: Checkpoint = "best", json: Json = False) -> int:
    """Check the numerical consistency of jaxgpt on this machine: with and without the KV cache, on 8 devices and 1, and more.

    Uses the weights of a run, after checking the files of its checkpoints, or random weights. The exit code is 1 if a check
    fails.

    jaxgpt verify
    jaxgpt verify llama-tiny
    jaxgpt verify runs/shakespeare --json

    Args:
        target: preset or run; empty: a small model
    """
    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=8))
    from jaxgpt.study.verify import LAWS
    from jaxgpt.study.verify import verify as check

    with progress("loading"):
        damaged = _damaged(target)
        lm, what = _model(target, checkpoint)
    about = {"model": what, "compute_dtype": "float32"} | _machine()
    rows, table = [], check(lm, LAWS)
    with progress("verifying") as activity:
        for law in LAWS:
            activity.stage(f"verifying: {law.name}")
            rows.append(next(table))
    failed = bool(damaged) or any(row.ok is False for row in rows)
    if json:
        print_json(about | {"ok": not failed, "damaged": damaged, "rows": [_plain(row) for row in rows]})
    else:
        _show(about, rows, lm.config.train.compute_dtype)
        for reason in damaged:
            print(f"FAILED: {reason}")
    return int(failed)


def _damaged(target: str) -> list[str]:
    """Return which checkpoints of a run do not match the digests in their checkpoint.json, and why."""
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.checkpoint.store import SEAL, find_damage

    paths = [path.parent for path in Run(Path(target)).checkpoints.glob(f"*/{SEAL}") if target not in ("", *PRESETS)]
    return [f"checkpoint {path}: {damage}" for path in sorted(paths) if (damage := find_damage(path))]


def _model(target: str, checkpoint: str) -> tuple[LM, str]:
    """Return the model to verify and a description of it."""
    from jaxgpt.lm import load
    from jaxgpt.study.verify import fresh
    from jaxgpt.trainer.metrics import parameter_count

    if target in PRESETS:
        lm, name = fresh(_bare(named_config(target))), f"{target}, random weights"
    elif target:
        lm, name = load(target, checkpoint), target
    else:
        small = _bare(preset(DEFAULT)).with_model(n_layer=2, n_embd=64)
        lm, name = fresh(small), "a small model with random weights (to check another: jaxgpt verify RUN or PRESET)"
    return lm, f"{name}; {parameter_count(lm.params):,} parameters"


def _bare(config: Config) -> Config:
    """Set the vocabulary size of a preset, and remove its dataset."""
    return replace(with_vocab(config), data=DataConfig(dataset="none"))


def _machine() -> dict[str, Any]:
    import jax

    import jaxgpt

    versions = {"jaxgpt": jaxgpt.__version__, "python": platform.python_version()}
    device = {"platform": jax.default_backend(), "kind": jax.devices()[0].device_kind, "count": jax.device_count()}
    versions |= {name: version(name) for name in PACKAGES}
    return {"versions": versions, "device": device, "flags": {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}}


def _plain(row: LawResult) -> dict[str, Any]:
    fields = row._asdict()
    difference = fields.pop("difference")
    finite = difference is not None and math.isfinite(difference)
    return fields | {"figure": difference if finite else None, "seconds": round(row.seconds, 3)}


def _show(about: dict[str, Any], rows: Sequence[LawResult], dtype: str) -> None:
    device, versions = about["device"], about["versions"]
    print_facts(
        {
            "model": about["model"],
            "computed": f"in float32{'' if dtype == 'float32' else f' (the run computes in {dtype})'}",
            "devices": f"{device['count']} x {device['kind']} ({device['platform']})",
            "versions": ", ".join(f"{name} {v}" for name, v in versions.items()),
            "XLA_FLAGS": about["flags"]["XLA_FLAGS"],
        }
    )
    width = max((len(row.name) for row in rows), default=0)
    print(f"\n{'law':<{width}}  difference  tolerance  seconds")
    for row in rows:
        difference = "" if row.difference is None else f"{row.difference:.1e}" if row.difference else "0"
        tolerance = f"{row.tolerance:.0e}" if row.tolerance else "0"
        print(f"{row.name:<{width}}  {difference:>10}  {tolerance:>9}  {row.seconds:7.1f}  {VERDICTS[row.ok]}")
    print()
    for row in rows:
        if row.note:
            print(f"{VERDICTS[row.ok]}: {row.name}: {row.note}")
    held, skipped = sum(row.ok is True for row in rows), sum(row.ok is None for row in rows)
    print(f"{held} of {len(rows) - skipped} laws hold" + (f", {skipped} skipped" if skipped else ""))
