"""jaxgpt plot RUN ... [--x step] [--out FILE]"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxgpt.cli.parse import Command, note
from jaxgpt.config import UserError

COMMAND = Command(
    "plot",
    "RUN ...",
    """Draw the losses of runs against steps, tokens and time, with the baselines of their data.

Training losses, each of a single batch, are pale; validation losses are marked by dots. The baselines are those of
`jaxgpt data report`, which training stores in the run; they are left out if the runs differ in them.""",
    [
        "jaxgpt plot runs/shakespeare",
        "jaxgpt plot runs/shakespeare runs/shakespeare-2 --out compare.svg",
        "jaxgpt plot runs/* --x tokens",
    ],
)
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Args:
    out: str = "losses.png"  # file to write: .png, .svg or .pdf
    x: Literal["all", "step", "tokens", "seconds"] = "all"  # horizontal axis; all: three plots side by side
    title: str = ""  # title of the picture


def run(args: Sequence[str]) -> int:
    targets, parsed = COMMAND.parse(Args, args)
    out = Path(parsed.out)
    if out.suffix.lower() not in FORMATS:
        raise UserError(f"--out {parsed.out} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if len(set(targets)) < len(targets):
        raise UserError("a run is named twice: name each run once")

    from jaxgpt.checkpoint.run import open_run
    from jaxgpt.cli.background import read_baselines
    from jaxgpt.files import write_atomically
    from jaxgpt.study.plot import losses
    from jaxgpt.trainer.metrics import read_metrics

    runs = {target: open_run(Path(target)) for target in targets}
    damaged, lines = list[str](), {}
    for target, each in runs.items():
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
    known = [found for each in runs.values() if (found := read_baselines(each.baselines))]
    same = all(found == known[0] for found in known)
    if not same:
        note("the baselines of the runs differ, because their data or tokenizers do: they are left out")
    figure = losses(lines, parsed.x, baselines=known[0] if known and same else None, title=parsed.title)
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix[1:].lower(), dpi=150)
    try:
        write_atomically(out, picture.getvalue())
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror}") from None
    print(f"wrote {out}: {len(runs)} run{'s' * (len(runs) > 1)}")
    return 0
