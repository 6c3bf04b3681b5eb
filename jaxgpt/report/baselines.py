"""Baselines of the loss of a run: losses of n-gram models, and bytes per token, in its baselines.json."""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict, cast

from jaxgpt.data import Data
from jaxgpt.directories import BASELINES
from jaxgpt.errors import UserError
from jaxgpt.files import read_json
from jaxgpt.report.fitted_ngrams import fit_ngrams
from jaxgpt.report.ngrams import MAX_BASE
from jaxgpt.report.text_bytes import bytes_per_token

QUICK = 1 << 22  # maximum number of tokens per split when a run starts, to save time


class Baselines(TypedDict):
    """The baselines of a run's loss, as in its baselines.json.

    Without this file, `read_baselines` returns only `losses`, empty.
    """

    losses: dict[str, float]  # as in `FittedNgrams`
    counted_tokens: NotRequired[int]
    evaluated_tokens: NotRequired[int]
    bytes_per_token: NotRequired[float]  # 0: unknown
    data: NotRequired[str]  # fingerprint of the data


def baselines(data: Data) -> Baselines | None:
    """Compute the baselines of a run's loss in one or two seconds, on at most `QUICK` tokens of each split.

    Returns None for conversations, pairs and prompts, too little data or a vocabulary above `MAX_BASE`.
    """
    size = data.tokenizer.vocab_size
    if any(source.is_examples for source in data.sources) or size > MAX_BASE:
        return None
    fitted = fit_ngrams(data.train, data.val, size, QUICK, QUICK)
    if fitted is None:
        return None
    return {
        "losses": fitted.losses,
        "counted_tokens": fitted.counted_tokens,
        "evaluated_tokens": fitted.evaluated_tokens,
        "bytes_per_token": bytes_per_token(data, QUICK),
        "data": data.fingerprint,
    }


def read_baselines(run: Path) -> Baselines:
    """Read a run's baselines.json, the result of `baselines`; without the file, return empty `losses`.

    Raises:
        UserError: if baselines.json is damaged.
    """
    path = run / BASELINES
    stored = read_json(path) if path.exists() else {}
    found = cast(Baselines, {"losses": {}} | stored)
    losses = found["losses"]
    if not isinstance(losses, dict) or not all(isinstance(loss, float) for loss in losses.values()):
        raise UserError(f"{path} is damaged: delete it; resuming the run computes it again")
    return found
