"""Laws of files: weights read back, here or by transformers, equal the weights written."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from jaxgpt.convert.models import read_model
from jaxgpt.model.params import flatten_params
from jaxgpt.study.verify.subject import Skipped, Subject, distance, same_bits


def saved(s: Subject) -> float:
    """Save a checkpoint, read it back and compare the bits of the weights."""
    return same_bits(s.read_back(), s.params)


def exported(s: Subject) -> float:
    """Export for transformers, import again and compare the bits of the weights.

    The export may hold more: ones and zeros for gains and biases that this model lacks.
    """
    back = flatten_params(read_model(s.exported)[1])
    ours = flatten_params(s.params)
    return same_bits({path: back[path] for path in ours}, ours)


def transformers(s: Subject) -> float:
    """Compare the logits with the logits that transformers computes from the exported directory."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"{' and '.join(missing)} not installed")
    folder = s.exported
    import torch
    import transformers as theirs

    theirs.utils.logging.set_verbosity_error()
    theirs.utils.logging.disable_progress_bar()
    model: Any = theirs.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor(np.asarray(s.tokens, np.int64))).logits.numpy()
    return distance(s.forward(s.params, s.tokens), logits)
