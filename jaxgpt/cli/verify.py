"""jaxgpt verify [RUN|PRESET]"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.output import print_json
from jaxgpt.cli.parse import Checkpoint, Json
from jaxgpt.cli.progress import progress
from jaxgpt.cli.settings import named_config
from jaxgpt.config import Config, DataConfig, MeshConfig
from jaxgpt.presets import DEFAULT, PRESETS, preset

if TYPE_CHECKING:
    from jaxgpt.cli.console import Console
    from jaxgpt.lm import LM
    from jaxgpt.study.verify import LawResult

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def verify(target: str = "", /, *, checkpoint: Checkpoint = "best", json: Json = False) -> int:
    """Check the numerical consistency of jaxgpt on this machine: with and without the KV cache, on 8 devices and 1, and more.

    Uses the weights of a run, or random weights. The exit code is 1 if a check fails.

    jaxgpt verify
    jaxgpt verify llama-tiny
    jaxgpt verify runs/shakespeare --json

    Args:
        target: preset or run; empty: a small model
    """
    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=8))
    from jaxgpt.cli.console import Console
    from jaxgpt.study.verify import LAWS
    from jaxgpt.study.verify import verify as check

    with progress("loading"):
        lm, what = _model(target, checkpoint)
    about = {"model": what, "compute_dtype": "float32"} | _machine()
    console, rows = Console(stderr=json), []
    table = check(lm, LAWS)
    with progress("verifying") as activity:
        for law in LAWS:
            activity.stage(f"verifying: {law.name}")
            rows.append(next(table))
    failed = any(row.ok is False for row in rows)
    if json:
        print_json(about | {"ok": not failed, "rows": [_plain(row) for row in rows]})
    else:
        _show(console, about, rows, lm.config.train.compute_dtype)
    return int(failed)


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
    from jaxgpt.cli.settings import with_vocab

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


def _show(console: Console, about: dict[str, Any], rows: Sequence[LawResult], dtype: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    device, versions = about["device"], about["versions"]
    lines = (
        f"model     {about['model']}",
        f"computed  in float32{'' if dtype == 'float32' else f' (the run computes in {dtype})'}",
        f"devices   {device['count']} x {device['kind']} ({device['platform']})",
        f"versions  {', '.join(f'{name} {v}' for name, v in versions.items())}",
        f"XLA_FLAGS {about['flags']['XLA_FLAGS']}",
    )
    console.write("\n".join(lines))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("law")
    for name in ("difference", "tolerance", "seconds", ""):
        table.add_column(name, justify="right")
    for row in rows:
        difference = "" if row.difference is None else f"{row.difference:.1e}" if row.difference else "0"
        word = {True: Text("ok", "green"), False: Text("FAILED", "red"), None: Text("skipped")}[row.ok]
        table.add_row(
            row.name, difference, f"{row.tolerance:.0e}" if row.tolerance else "0", f"{row.seconds:.1f}", word
        )
    console.print(table)
    for row in rows:
        if row.note:
            verdict = "skipped" if row.ok is None else "FAILED"
            console.write(f"{verdict}: {row.name}: {row.note}")
    held, skipped = sum(row.ok is True for row in rows), sum(row.ok is None for row in rows)
    console.write(f"{held} of {len(rows) - skipped} laws hold" + (f", {skipped} skipped" if skipped else ""))
