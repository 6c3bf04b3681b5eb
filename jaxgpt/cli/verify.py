"""jaxgpt verify [RUN|PRESET]"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.cli.console import progress
from jaxgpt.cli.options import Checkpoint, Json
from jaxgpt.cli.output import aligned, columns, print_result
from jaxgpt.cli.settings import named_config, with_vocab
from jaxgpt.config import DataConfig, MeshConfig
from jaxgpt.errors import FAILED
from jaxgpt.presets import PRESETS

if TYPE_CHECKING:
    from jaxgpt.lm import LM
    from jaxgpt.verify import LawResult

VERDICTS = {True: "ok", False: "FAILED", None: "skipped"}


def verify(target: str = "", /, *, checkpoint: Checkpoint = "best", json: Json = False) -> int:
    """Check that equivalent computations agree on this machine, for example with and without a KV cache.

    Uses the weights of a run, after checking the files of its checkpoints; without
    a run, uses random weights. The exit code is 1 if a check fails.

    jaxgpt verify
    jaxgpt verify llama-tiny
    jaxgpt verify runs/shakespeare --json

    Args:
        target: preset or run; empty: a small model
    """
    from jaxgpt.parallel.host import use_cores

    use_cores(MeshConfig(data=8))
    import jax

    from jaxgpt.provenance import versions
    from jaxgpt.verify import LAWS
    from jaxgpt.verify import verify as measure

    with progress("loading") as activity:
        damaged = _damaged(target)
        lm, model = _model(target, checkpoint)
        rows = list(measure(lm, LAWS, activity))

    kind = jax.devices()[0].device_kind
    about = {
        "model": model,
        "dtype": "float32, regardless of train.compute_dtype",
        "devices": f"{jax.device_count()} x {kind} ({jax.default_backend()})",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    failed = bool(damaged) or any(row.ok is False for row in rows)
    values = about | {"ok": not failed, "damaged": damaged, "rows": [row._asdict() for row in rows]}
    text = "\n".join([aligned(about), _table(rows), *(f"FAILED: {reason}" for reason in damaged)])
    print_result(json, values, text)
    return FAILED if failed else 0


def _damaged(target: str) -> list[str]:
    """Describe the damaged checkpoints of a run (`find_damage`); return [] for a preset."""
    from jaxgpt.checkpoint.index import saved_steps
    from jaxgpt.checkpoint.intact import find_damage
    from jaxgpt.checkpoint.run import Run

    if target in ("", *PRESETS):
        return []
    directory = Run(Path(target)).checkpoints
    found = []
    for step in saved_steps(directory):
        path = directory / str(step)
        damage = find_damage(path)
        if damage:
            found.append(f"checkpoint {path}: {damage}")
    return found


def _model(target: str, checkpoint: str) -> tuple[LM, str]:
    """Return the model to verify and a description of it."""
    from jaxgpt.counts import parameter_count
    from jaxgpt.lm import load
    from jaxgpt.verify import fresh

    if target and target not in PRESETS:
        lm = load(target, checkpoint)
        name = target
    else:
        config = replace(with_vocab(named_config(target)), data=DataConfig(dataset="none"))
        lm = fresh(config if target else config.with_model(n_layer=2, n_embd=64))
        name = f"{target or 'a small model'}, random weights"
    return lm, f"{name}; {parameter_count(lm.params):,} parameters"


def _table(rows: Sequence[LawResult]) -> str:
    """Format the results of laws, their notes, and the number of laws that hold."""
    cells = [["law", "difference", "tolerance", "seconds", ""]]
    for row in rows:
        difference = "" if row.difference is None else f"{row.difference:.1e}"
        cells.append([row.name, difference, f"{row.tolerance:.0e}", f"{row.seconds:.1f}", VERDICTS[row.ok]])
    notes = [f"{VERDICTS[row.ok]}: {row.name}: {row.note}" for row in rows if row.note]
    held = sum(row.ok is True for row in rows)
    skipped = sum(row.ok is None for row in rows)
    summary = f"{held} of {len(rows) - skipped} laws hold"
    if skipped:
        summary += f", {skipped} skipped"
    return "\n".join([f"\n{columns(cells)}\n", *notes, summary])
