"""The lines at the end of a training run: the baselines of its loss, its directory and the next command."""

from __future__ import annotations

import shlex

from jaxgpt.atomic import write_json
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.final_sample import sample_command
from jaxgpt.cli.output import Facts
from jaxgpt.data import Data
from jaxgpt.directories import BASELINES
from jaxgpt.errors import UserError
from jaxgpt.report.baselines import baselines, read_baselines


def run_summary(run: Run, data: Data, prompt: str) -> Facts:
    """Return the facts at the end of a run.

    The fact `next` is a command: `jaxgpt chat` if the data are examples (`Data.is_examples`) and the tokenizer has a chat
    template, otherwise `jaxgpt sample` with `prompt`.
    """
    losses = ", ".join(f"{name} {loss:.2f}" for name, loss in _recorded_losses(run).items())
    can_chat = data.is_examples and data.tokenizer.special.chat_template is not None
    return {
        "baseline": f"{losses} (nats per token)" if losses else "",
        "run": f"{run.path} (loss.png, metrics.jsonl, checkpoints)",
        "next": shlex.join(["jaxgpt", "chat", str(run.path)]) if can_chat else sample_command(run.path, prompt),
    }


def update_baselines(run: Run, data: Data, objective: str) -> None:
    """Write baselines.json, unless the file already describes these data; a resumed run may have a different mixture.

    The file is deleted if the data or the objective has no baselines.
    """
    if _has_baselines(run, data):
        return
    path = run.path / BASELINES
    found = baselines(data) if objective == "next-token" else None
    if found:
        write_json(path, found)
    else:
        path.unlink(missing_ok=True)


def _has_baselines(run: Run, data: Data) -> bool:
    """Return whether baselines.json has the baselines of these data; False for a damaged file."""
    try:
        recorded = read_baselines(run.path)
    except UserError:
        return False
    return bool(recorded["losses"]) and recorded.get("data") == data.fingerprint


def _recorded_losses(run: Run) -> dict[str, float]:
    """Return the baselines of a run, keyed by name; {} if baselines.json is missing or damaged."""
    try:
        return dict(read_baselines(run.path)["losses"])
    except UserError:
        return {}
