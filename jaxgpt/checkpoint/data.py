"""Data of a run: compare the data that a command has opened with the data at a checkpoint."""

from __future__ import annotations

from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.store import Info, read_info, resolve_step
from jaxgpt.data import Data


def about_data(data: Data) -> dict[str, object]:
    """Return the entries of a checkpoint that identify the data of its run."""
    return {"data": data.fingerprint, "data_tokens": _tokens(data), "data_boundary": _boundary(data)}


def data_change(run: Run, checkpoint: str | Info, data: Data) -> str:
    """Describe how the data of a run have changed since a checkpoint; "" if they are equal or were not recorded.

    Args:
        run: the run.
        checkpoint: `best`, `last`, a step, or the contents of a checkpoint.json.
        data: the data that the settings of the run now specify.
    """
    if isinstance(checkpoint, str):
        step = resolve_step(run.checkpoints, checkpoint)
        checkpoint = read_info(run.checkpoints / str(step))
    about = checkpoint.about
    is_same_content = about.get("data", data.fingerprint) == data.fingerprint
    # Files that are renamed from train to val have the same content; checkpoints of 0.1.0 have no boundary.
    is_same_split = about.get("data_boundary", _boundary(data)) == _boundary(data)
    if is_same_content and is_same_split:
        return ""
    was = about.get("data_tokens")
    now = _tokens(data)
    sizes = f" ({was:,} tokens then, {now:,} now)" if isinstance(was, int) and was != now else ""
    moved = "; other files are for validation now" if is_same_content else ""
    return f"the data of {run.path} has changed since step {checkpoint.step}: {data.source}{sizes}{moved}"


def _boundary(data: Data) -> int | list[int | None] | None:
    """Return where the validation files begin, for each source of a mixture."""
    if data.parts:
        return [part.boundary for part in data.parts]
    return data.boundary


def _tokens(data: Data) -> int:
    return len(data.train) + len(data.val) * data.held_out
