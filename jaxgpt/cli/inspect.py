"""jaxgpt inspect RUN --prompt TEXT [--html FILE]"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.atomic import check_writable, write_atomically
from jaxgpt.cli.console import progress
from jaxgpt.cli.options import Checkpoint, Count, Json
from jaxgpt.cli.output import print_result

if TYPE_CHECKING:
    from jaxgpt.study.inspection import Inspection


def inspect(
    run: str,
    /,
    *,
    prompt: str = "",
    max_new_tokens: Count = 20,
    checkpoint: Checkpoint = "best",
    html: str = "",
    json: Json = False,
) -> int:
    """Show what a model computes for a text: predictions by token and layer, attention and norms.

    The table shows the predictions; --json adds the logit lens, norms and a summary
    of each head. With --html, write a self-contained page: point at a token to see
    the tokens that it attends to in the selected head.

    jaxgpt inspect runs/shakespeare --prompt ROMEO:
    jaxgpt inspect runs/shakespeare --prompt ROMEO: --html page.html
    jaxgpt inspect runs/shakespeare --prompt ROMEO: --max-new-tokens 0 --json

    Args:
        run: run with the model
        prompt: text to continue; empty: start a new text
        max_new_tokens: maximum number of new tokens (greedy decoding); 0: inspect the prompt alone
        html: write a page to this file
    """
    if html:
        check_writable(Path(html))
    from jaxgpt.lm import load
    from jaxgpt.study import inspection, page

    with progress("loading"):
        lm = load(run, checkpoint)
    with progress("computing"):
        found = inspection.inspect(lm, prompt, max_new_tokens=max_new_tokens)
    if html:
        content = page.html(found, run)
        write_atomically(Path(html), content)
        size = Path(html).stat().st_size
        text = f"wrote {html}: {size / 1e3:,.0f} kB"
    else:
        text = _table(found)
    return print_result(json, {"run": run} | found.to_json(), text)


def _table(found: Inspection) -> str:
    """Format the predictions as a table."""
    lines = [f"{'':>4} {'after':<16} {'next':>6} {'rank':>6} {'entropy':>8}  most probable"]
    for i, token in enumerate(found.tokens):
        has_next = i < len(found.next_rank)  # the last token has no next token
        probability = f"{found.next_probability[i]:.1%}" if has_next else ""
        rank = f"{found.next_rank[i]:,}" if has_next else ""
        top = zip(found.top_tokens[i], found.top_probabilities[i], strict=True)
        best = ", ".join(f"{word!r} {p:.1%}" for word, p in top)
        lines.append(f"{i:>4} {token!r:<16} {probability:>6} {rank:>6} {found.entropy[i]:>8.2f}  {best}")
    return "\n".join(lines)
