"""jaxgpt: a decoder-only transformer in JAX and Flax linen. The import initializes no device.

lm = jaxgpt.load("runs/shakespeare")
outs = jaxgpt.generate(lm, ["ROMEO:"], max_new_tokens=100, temperature=0.8)
logits_BTV = jaxgpt.GPT(lm.config.model).apply({"params": lm.params}, tokens_BT)
hidden, attentions = jaxgpt.study.capture(lm, tokens_BT)[1:]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxgpt.runtime import set_safe_flag

if TYPE_CHECKING:
    from jaxgpt import study
    from jaxgpt.config import Config, ModelConfig, OptimConfig, TrainConfig
    from jaxgpt.data.batches import batches
    from jaxgpt.lm import LM, chat, explain, generate, load, save, score, stream
    from jaxgpt.model import GPT
    from jaxgpt.model.init import init_params
    from jaxgpt.ops.attention import attend
    from jaxgpt.presets import preset
    from jaxgpt.train.loss import next_token_loss
    from jaxgpt.train.optimizer import make_optimizer
    from jaxgpt.train.schedule import schedule
    from jaxgpt.train.step import TrainState, init_state, train_step
    from jaxgpt.trainer.build import build

__version__ = "0.1.0"

# XLA's CPU backend in some versions of jaxlib needs this flag for correct results. The import changes nothing else in the
# process.
set_safe_flag()

# These names are imported on first access, so that `import jaxgpt` is fast and initializes no device.
_NAMES = {
    "config": "Config ModelConfig OptimConfig TrainConfig",
    "data.batches": "batches",
    "lm": "LM chat explain generate load save score stream",
    "model": "GPT",
    "model.init": "init_params",
    "ops.attention": "attend",
    "presets": "preset",
    "study": "study",
    "train.loss": "next_token_loss",
    "train.optimizer": "make_optimizer",
    "train.schedule": "schedule",
    "train.step": "TrainState init_state train_step",
    "trainer.build": "build",
}
_HOME = {name: f"jaxgpt.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxgpt' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    if name == "study":
        return module
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
