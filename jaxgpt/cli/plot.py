"""jaxgpt plot RUN ... [--x step] [--out FILE]"""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxgpt.cli.output import note
from jaxgpt.config import flat
from jaxgpt.errors import UserError, plural

FORMATS = (".png", ".svg", ".pdf")
SHOWN = 6  # columns of settings that differ


def plot(
    *runs: str, out: str = "losses.png", x: Literal["all", "step", "tokens", "seconds"] = "all", title: str = ""
) -> int:
    """Draw the losses of runs against steps, tokens and time, with the baselines of their data.

    Prints a table of the runs: the lowest validation loss and its step, tokens/s, and the settings that differ.
    Training losses, each of a single batch, are pale; validation losses are marked by dots. The baselines are the losses of
    `jaxgpt data report`, which training stores in the run; they are omitted if they differ between runs.

    jaxgpt plot runs/shakespeare
    jaxgpt plot runs/shakespeare runs/shakespeare-2 --out compare.svg
    jaxgpt plot runs/* --x tokens

    Args:
        runs: runs to draw
        out: file to write: .png, .svg or .pdf
        x: horizontal axis; all: three plots side by side
        title: title of the picture
    """
    path = Path(out)
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--out {out} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not runs:
        raise UserError("missing argument: the runs to draw, as in jaxgpt plot runs/shakespeare")
    if len(set(runs)) < len(runs):
        raise UserError("a run is named twice: name each run once")

    from jaxgpt.checkpoint.run import open_run
    from jaxgpt.cli.background import read_baselines
    from jaxgpt.files import write_atomically
    from jaxgpt.study.plot import losses
    from jaxgpt.trainer.metrics import read_metrics

    opened = {target: open_run(Path(target)) for target in runs}
    damaged, lines = list[str](), {}
    for target, each in opened.items():
        try:
            lines[target] = list(read_metrics(each.metrics))
            with each.metrics.open("rb") as file:
                lost = sum(1 for line in file if line.strip()) - len(lines[target])
        except FileNotFoundError:
            raise UserError(f"{target} has no metrics.jsonl: it was imported or saved, not trained") from None
        except OSError as e:
            raise UserError(f"cannot read {each.metrics}: {e.strerror}") from None
        damaged += [f"{lost} in {each.metrics}"] if lost else []
    if damaged:
        note(f"skipped damaged lines: {', '.join(damaged)}")
    known = [found for each in opened.values() if (found := read_baselines(each.baselines))]
    same = all(found == known[0] for found in known)
    if not same:
        note("the baselines of the runs differ, because their data or tokenizers do: they are left out")
    figure = losses(lines, x, baselines=known[0] if known and same else None, title=title)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
    try:
        write_atomically(path, picture.getvalue())
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from None
    print("\n".join(table({target: flat(each.config()) for target, each in opened.items()}, lines)))
    print(f"wrote {path}: {plural(len(runs), 'run')}")
    return 0


def table(settings: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the lines of a table of runs, the lowest validation loss first.

    Args:
        settings: the flat config of each run.
        metrics: the lines of metrics.jsonl of each run.
    """
    first = next(iter(settings.values()))
    differ = [key for key in first if any(each[key] != first[key] for each in settings.values())]
    rows = []
    for name, lines in metrics.items():
        evaluated = [line for line in lines if isinstance(line.get("val_loss"), float)]
        best = min(evaluated, key=lambda line: line["val_loss"], default=None)
        speeds = [speed for line in lines if isinstance(speed := line.get("tokens_per_second"), float)]
        loss = [f"{best['val_loss']:.4f}", f"{best['step']:,}"] if best else ["", ""]
        speed = f"{statistics.median(speeds):,.0f}" if speeds else ""
        rows.append([name, *loss, speed, *(str(settings[name][key]) for key in differ[:SHOWN])])
    rows.sort(key=lambda row: float(row[1] or "inf"))
    head = ["run", "val loss", "step", "tokens/s", *differ[:SHOWN]]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([f"{row[0]:<{widths[0]}}", *cells]).rstrip()

    others = f"further settings that differ: {', '.join(differ[SHOWN:])}"
    return [*map(line, [head, *rows]), *([others] if differ[SHOWN:] else [])]
