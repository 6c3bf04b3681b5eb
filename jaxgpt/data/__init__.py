"""Data: text -> token ids -> windows -> the batch of a step."""

from jaxgpt.data.batches import Batches, Windows
from jaxgpt.data.mixture import Mixture
from jaxgpt.data.open import Data, open_data, vocab_size, with_path
from jaxgpt.data.packing import Packed
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokenizer_files import load_tokenizer
from jaxgpt.data.tokens import Split, Tokens

__all__ = [
    "Batches",
    "Data",
    "Mixture",
    "Packed",
    "Split",
    "Tokenizer",
    "Tokens",
    "Windows",
    "load_tokenizer",
    "open_data",
    "vocab_size",
    "with_path",
]
