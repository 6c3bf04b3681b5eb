"""Data: text -> token ids -> windows -> the batch of a step."""

from jaxgpt.data.batches import Batches, Windows
from jaxgpt.data.mixture import Mixture
from jaxgpt.data.open import open_data, with_path
from jaxgpt.data.opened import Data
from jaxgpt.data.packing import Packed
from jaxgpt.data.preferences import Preferences
from jaxgpt.data.prompts import PromptSplit
from jaxgpt.data.tokens import Split, Tokens

__all__ = [
    "Batches",
    "Data",
    "Mixture",
    "Packed",
    "Preferences",
    "PromptSplit",
    "Split",
    "Tokens",
    "Windows",
    "open_data",
    "with_path",
]
