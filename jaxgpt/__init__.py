"""jaxgpt: a decoder-only transformer in JAX and Flax linen. Importing it initializes no device.

lm = jaxgpt.load("runs/shakespeare")
outs = jaxgpt.generate(lm, ["ROMEO:"], max_new_tokens=100, temperature=0.8)
logits_BTV = jaxgpt.GPT(lm.config.model).apply({"params": lm.params}, tokens_BT)
hidden, attentions = jaxgpt.study.capture(lm, tokens_BT)[1:]
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgpt import course, study
    from jaxgpt.config import Config, ModelConfig, OptimConfig, TrainConfig
    from jaxgpt.data.batches import batches
    from jaxgpt.lm import LM, chat, explain, generate, load, save, stream
    from jaxgpt.model import GPT
    from jaxgpt.model.params import init_params
    from jaxgpt.ops.attention import attend
    from jaxgpt.presets import preset
    from jaxgpt.train.loss import make_loss_fn
    from jaxgpt.train.optimizer import make_optimizer, schedule
    from jaxgpt.train.step import TrainState, init_state, train_step
    from jaxgpt.trainer.program import build

__version__ = "0.1.0"
__all__ = [
    "GPT",
    "LM",
    "Config",
    "ModelConfig",
    "OptimConfig",
    "TrainConfig",
    "TrainState",
    "attend",
    "batches",
    "build",
    "chat",
    "course",
    "explain",
    "generate",
    "init_params",
    "init_state",
    "load",
    "make_loss_fn",
    "make_optimizer",
    "preset",
    "save",
    "schedule",
    "stream",
    "study",
    "train_step",
]

# XLA's CPU backend in jaxlib 0.10 to 0.12 miscompiles some fused reductions: sum((E @ full_like(E, c)) * E, -1) under jit
# gives NaN or 1e31. XLA reads its flags once, when the backend starts, so the flag must be set on import.
SAFE_FLAG = "--xla_cpu_experimental_ynn_fusion_type=-reduce"
# LLVM compiles a train step in four fifths of the time if it does not unroll loops, and steps are as fast (docs/log.md).
QUICK_FLAG = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling=true"


class MiscompiledReductions(RuntimeWarning):
    """XLA's CPU backend runs with fused reductions, some of which it miscompiles."""


def _said_of_reductions(flags: str) -> bool | None:
    """Return whether XLA flags enable fused reductions; None if they do not say, in which case XLA enables them.

    Repeated flags apply in order: `+kind` and `-kind` add and remove a kind, a plain list replaces all kinds.
    """
    said = None
    for value in re.findall(SAFE_FLAG.split("=")[0] + r"=(\S*)", flags):
        kinds = value.strip("'\"").lower().split(",")
        if "reduce" in kinds or "+reduce" in kinds:
            said = True
        elif "-reduce" in kinds or not value.startswith(("+", "-")):
            said = False
    return said


def _set_compiler_flags() -> None:
    """Add the flags above to XLA_FLAGS, where these do not say otherwise; warn if reductions stay fused on a CPU."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    # XLA reads flags from a file if this is not a flag.
    file = Path(flags) if flags and not flags.startswith("-") else None
    said = _said_of_reductions(file.read_text() if file and file.is_file() else flags)
    bridge = sys.modules.get("jax._src.xla_bridge")
    late = bridge is not None and bridge.backends_are_initialized()
    if not late and not file:
        added = [SAFE_FLAG] * (said is None) + [QUICK_FLAG] * (QUICK_FLAG.split("=")[0] not in flags)
        os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()
        said = bool(said)
    if said is False or (late and sys.modules["jax"].default_backend() != "cpu"):
        return
    why = "XLA's CPU backend started before jaxgpt was imported" if late else f"XLA_FLAGS is {flags}"
    fix = f"add {SAFE_FLAG} to {file}" if file else f'start Python with XLA_FLAGS="{f"{flags} {SAFE_FLAG}".strip()}"'
    warnings.warn(
        f"{why}: fused reductions are on, which jaxlib 0.10 to 0.12 can miscompile to wrong numbers; {fix}",
        MiscompiledReductions,
        stacklevel=3,
    )


_set_compiler_flags()

# Imported on first access, so that `import jaxgpt` is fast and initializes no device.
_HOME = {
    "Config": "jaxgpt.config",
    "GPT": "jaxgpt.model",
    "LM": "jaxgpt.lm",
    "ModelConfig": "jaxgpt.config",
    "OptimConfig": "jaxgpt.config",
    "TrainConfig": "jaxgpt.config",
    "TrainState": "jaxgpt.train.step",
    "attend": "jaxgpt.ops.attention",
    "batches": "jaxgpt.data.batches",
    "build": "jaxgpt.trainer.program",
    "chat": "jaxgpt.lm",
    "explain": "jaxgpt.lm",
    "generate": "jaxgpt.lm",
    "init_params": "jaxgpt.model.params",
    "init_state": "jaxgpt.train.step",
    "load": "jaxgpt.lm",
    "make_loss_fn": "jaxgpt.train.loss",
    "make_optimizer": "jaxgpt.train.optimizer",
    "preset": "jaxgpt.presets",
    "save": "jaxgpt.lm",
    "schedule": "jaxgpt.train.optimizer",
    "stream": "jaxgpt.lm",
    "train_step": "jaxgpt.train.step",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in ("course", "study"):
        return importlib.import_module("jaxgpt." + name)
    raise AttributeError(f"module 'jaxgpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
