"""Decoding: logits -> next token -> text. Filters, sampling, the sampler, beam search and streaming text."""

from jaxgpt.config import BeamParams, SamplingParams
from jaxgpt.decoding.engine import DecodeSession, search
from jaxgpt.decoding.sampler import Model
from jaxgpt.decoding.sampling import TokenBuffer, sample_token, warp
from jaxgpt.decoding.text import TextStream

__all__ = [
    "BeamParams",
    "DecodeSession",
    "Model",
    "SamplingParams",
    "TextStream",
    "TokenBuffer",
    "sample_token",
    "search",
    "warp",
]
