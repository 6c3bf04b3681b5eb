"""jaxgpt: a decoder-only transformer in JAX and Flax linen. Importing it touches no device.

lm = jaxgpt.load("runs/shakespeare")
outs = jaxgpt.generate(lm, ["ROMEO:"], max_new_tokens=100, temperature=0.8)
logits_BTV = jaxgpt.GPT(lm.config.model).apply({"params": lm.params}, tokens_BT)
hidden, attentions = jaxgpt.study.capture(lm, tokens_BT)[1:]
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgpt import study
    from jaxgpt.lm import LM, generate, load, stream
    from jaxgpt.model import GPT

__version__ = "0.1.0"
__all__ = ["GPT", "LM", "generate", "load", "stream", "study"]

# XLA's CPU backend in jaxlib 0.10 to 0.12 fuses some reductions into wrong numbers: sum((E @ full_like(E, c)) * E, -1)
# under jit gives NaN or 1e31. It reads this when a backend starts, so it has to stand here. A user's value stays.
_FLAG = "--xla_cpu_experimental_ynn_fusion_type"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=-reduce".strip()

_HOME = {"GPT": "jaxgpt.model", "LM": "jaxgpt.lm", "generate": "jaxgpt.lm", "load": "jaxgpt.lm", "stream": "jaxgpt.lm"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name == "study":
        return importlib.import_module("jaxgpt.study")
    raise AttributeError(f"module 'jaxgpt' has no attribute {name!r}")
