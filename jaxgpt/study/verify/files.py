"""Laws of files: weights read back, here or by transformers, equal the weights written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.convert.models import export_model, read_model
from jaxgpt.errors import UserError
from jaxgpt.lm import load
from jaxgpt.model.params import flatten_params
from jaxgpt.study.verify.subject import Skipped, Subject, distance


def saved(s: Subject) -> float:
    """Save a checkpoint, read it back and compare the weights."""
    return distance(load(s.saved).params, s.params)


def exported(s: Subject) -> float:
    """Export for transformers, import again and compare the weights.

    The export may hold more: ones and zeros for gains and biases that this model lacks.
    """
    back = flatten_params(read_model(_export(s))[1])
    ours = flatten_params(s.params)
    return distance({path: back[path] for path in ours}, ours)


def transformers(s: Subject) -> float:
    """Compare the logits with the logits that transformers computes from the exported directory."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"{' and '.join(missing)} not installed")
    exported = _export(s)
    import torch
    import transformers as theirs

    theirs.utils.logging.set_verbosity_error()
    theirs.utils.logging.disable_progress_bar()
    how = {"attn_implementation": "eager", "dtype": torch.float32}
    model: Any = theirs.AutoModelForCausalLM.from_pretrained(exported, **how).eval()
    with torch.no_grad():
        logits = model(torch.tensor(np.asarray(s.tokens, np.int64))).logits.numpy()
    return distance(s.forward(s.params, s.tokens), logits)


def _export(s: Subject) -> Path:
    """Export the model for transformers, unless it is done.

    Raises:
        Skipped: if transformers has no equivalent architecture.
    """
    directory = s.directory / "exported"
    try:
        if not directory.exists():
            export_model(s.saved, directory)
    except UserError as e:
        raise Skipped(str(e)) from None
    return directory
