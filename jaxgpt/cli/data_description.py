"""The text and the numbers of `jaxgpt data report` for one source: text, or preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.cli.output import aligned, columns
from jaxgpt.errors import plural

if TYPE_CHECKING:
    from jaxgpt.report.describe import TextDescription
    from jaxgpt.report.preferences import PairsDescription


class SourceDescription(NamedTuple):
    """The description of one source.

    Attributes:
        numbers: values for JSON.
        facts: lines, keyed by label.
        table: text after the lines; "": no table.
    """

    numbers: Mapping[str, Any]
    facts: Mapping[str, str | Sequence[str]]
    table: str = ""

    def text(self, source: str = "") -> str:
        """Format the description; `source`: the path and share of a source of a mixture, or ""."""
        lines = aligned({"source": source, **self.facts})
        return f"{lines}\n\n{self.table}" if self.table else lines


def pairs_description(results: PairsDescription) -> SourceDescription:
    """Return the description of preference pairs."""
    return SourceDescription({**results}, _facts_of_pairs(results))


def text_description(results: TextDescription) -> SourceDescription:
    """Return the description of text."""
    return SourceDescription({**results}, _facts_of_text(results), _baselines(results))


def _facts_of_pairs(results: PairsDescription) -> dict[str, str | list[str]]:
    """Return the lines about preference pairs, keyed by label."""
    val = results["validation_pairs"]
    held_out = f"{val:,} validation" if val else "no validation"
    shared = results["shared_prompts"]
    lengths = []
    for name, values in results["lengths"].items():
        middle = f"mean {values['mean']:.1f}, median {values['median']:g}"
        lengths.append(f"{name} {middle}, 95% {values['p95']:g}, max {values['max']:,}")
    return {
        "data": results["source"],
        "pairs": f"{results['train_pairs']:,} training, {held_out}, {plural(results['duplicate_pairs'], 'duplicate')}",
        "contradictions": f"{plural(results['contradictions'], 'pair')} that also occur with swapped answers",
        "prompts": f"{results['prompts']:,} different; {plural(shared, 'validation pair')} with a training prompt",
        "tokens": lengths,
        "longer": f"the chosen answer has more tokens in {results['longer_chosen']:.1%} of the pairs",
        "longest": f"{results['longest']:,} tokens: --data.window {results['longest'] - 1} holds all pairs",
    }


def _facts_of_text(results: TextDescription) -> dict[str, str]:
    """Return the lines about text, keyed by label."""
    val = results["validation_tokens"]
    held_out = f"{val:,} validation" if val else "no validation"
    size = results["bytes_per_token"]
    ratio = f"; {size:.2f} bytes per token" if size else ""
    overlap = results["overlap"]
    return {
        "data": results["source"],
        "tokens": f"{results['train_tokens']:,} training, {held_out}{ratio}",
        "vocabulary": f"{results['vocabulary_used']:,} of {results['vocabulary']:,} tokens occur",
        "documents": _count(results["documents"], results["duplicate_documents"]),
        "lines": _count(results["lines"], results["duplicate_lines"]),
        "overlap": "" if overlap is None else f"{overlap:.2%} of the validation 13-grams occur in the training tokens",
    }


def _count(total: int | None, duplicates: int | None) -> str:
    """Format a number of documents or lines and of duplicates among them; "" if a number is unknown."""
    if total is None or duplicates is None:
        return ""
    share = f" ({duplicates / total:.1%})" if duplicates else ""
    return f"{total:,}, {plural(duplicates, 'duplicate')}{share}"


def _baselines(results: TextDescription) -> str:
    """Format the table of baselines, and the number of tokens that the baselines are computed on."""
    rows = [["baseline", "nats per token", "bits per byte"]]
    for name, row in results["baselines"].items():
        label = f"uniform, ln {results['vocabulary']}" if name == "uniform" else name
        bits = row["bits_per_byte"]
        rows.append([label, f"{row['loss']:.4f}", "unknown" if bits is None else f"{bits:.4f}"])
    split = "validation tokens" if results["validation_tokens"] else "training tokens (nothing is held out)"
    basis = f"On {results['evaluated_tokens']:,} {split}"
    counted = results["counted_tokens"]
    if counted < results["train_tokens"] - 2:  # a sample of the training tokens
        basis += f"; n-grams are counted in {counted:,} training tokens"
    return f"{columns(rows)}\n\n{basis}."
