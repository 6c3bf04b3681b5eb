"""jaxgpt inspect RUN --prompt TEXT [--html FILE]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.cli.parse import Command, print_json
from jaxgpt.cli.progress import progress
from jaxgpt.cli.sample import check_seed, say_where_it_begins
from jaxgpt.config import SEED, MeshConfig, UserError

if TYPE_CHECKING:
    from jaxgpt.study.inspection import Inspection

COMMAND = Command(
    "inspect",
    "RUN",
    """Show what a model computes for a text: predictions after each token, by layer, attention and norms.

With --html, write them as one page that needs no network: point at a token to see where each head looks.""",
    [
        "jaxgpt inspect runs/shakespeare --prompt ROMEO:",
        "jaxgpt inspect runs/shakespeare --prompt ROMEO: --html page.html",
        "jaxgpt inspect runs/shakespeare --prompt ROMEO: --max-new-tokens 0 --json",
    ],
)


@dataclass(frozen=True)
class Args:
    prompt: str = ""  # text to continue; empty: start a new text
    max_new_tokens: int = 20  # maximum number of new tokens; 0: inspect the prompt alone
    temperature: float = 0.0  # divide the logits by this; 0 always takes the most probable token (greedy)
    seed: int = SEED  # random seed
    checkpoint: str = "best"  # checkpoint to load: best (lowest validation loss), last, or a step
    html: str = ""  # write a page to this file
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [target], parsed = COMMAND.parse(Args, args)
    check_seed(parsed.seed)
    if parsed.max_new_tokens < 0:
        raise UserError(f"--max-new-tokens must be at least 0, not {parsed.max_new_tokens}")
    if parsed.html and not Path(parsed.html).absolute().parent.is_dir():
        raise UserError(f"cannot write {parsed.html}: no such folder; create it, or choose another path")

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    from jaxgpt.files import write_atomically
    from jaxgpt.lm import load
    from jaxgpt.study.inspection import inspect
    from jaxgpt.study.page import html

    with progress("loading") as activity:
        lm = load(target, parsed.checkpoint)
        say_where_it_begins(lm.tokenizer, [parsed.prompt])
        activity.stage("computing")
        found = inspect(
            lm, parsed.prompt, max_new_tokens=parsed.max_new_tokens, temperature=parsed.temperature, key=parsed.seed
        )
    if parsed.html:
        page = html(found, target)
        try:
            write_atomically(Path(parsed.html), page)
        except OSError as e:
            raise UserError(f"cannot write {parsed.html}: {e.strerror}") from None
    if parsed.json:
        print_json({"run": target} | found.to_json())
    elif parsed.html:
        print(f"wrote {parsed.html}: {len(page) / 1e3:,.0f} kB")
    else:
        print("\n".join(table(found)))
    return 0


def table(found: Inspection) -> list[str]:
    """Return the lines of a table of the predictions."""
    lines = [f"{'':>4} {'after':<16} {'next':>6} {'rank':>6} {'entropy':>8}  most probable"]
    for i, token in enumerate(found.tokens):
        last = i == len(found.next_rank)
        follows = f"{'':>6} {'':>6}" if last else f"{found.next_probability[i]:>6.1%} {found.next_rank[i]:>6,}"
        best = ", ".join(
            f"{word!r} {p:.1%}" for word, p in zip(found.top_tokens[i], found.top_probabilities[i], strict=True)
        )
        lines.append(f"{i:>4} {token!r:<16} {follows} {found.entropy[i]:>8.2f}  {best}")
    return lines
