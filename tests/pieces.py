"""A model with a tokenizer as in Llama 2, which often generates special tokens and bytes of characters."""

from __future__ import annotations

import json

import jax.numpy as jnp
from folders import llama_tokenizer
from helpers import lm_of
from tokenizers import Tokenizer

from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.lm import LM

BYTES = 3  # id of the byte 0
TURN = ("<|im_start|>", "<|im_end|>")


def lm_of_pieces() -> LM:
    """Return a Llama with random weights; its texts consist of a, b, \u00e9, spaces and names of special tokens."""
    library = Tokenizer.from_str(json.dumps(llama_tokenizer(TURN)))
    tokenizer = SubwordTokenizer(library)
    tokenizer.special = SpecialTokens({"bos_token_id": 1, "eos_token_id": 2}, {"bos_token": "<s>", "eos_token": "</s>"})
    size = tokenizer.vocab_size
    lm = lm_of("llama", block_size=48, vocab_size=size)

    likely = {1, BYTES + 0xC3, BYTES + 0xA9, *range(BYTES + 256, size)}
    scale_V = jnp.array([1.0 if i in likely else 0.2 for i in range(size)])
    head = lm.params["lm_head"]["kernel"] * scale_V[None]
    return lm._replace(params={**lm.params, "lm_head": {"kernel": head}}, tokenizer=tokenizer)
