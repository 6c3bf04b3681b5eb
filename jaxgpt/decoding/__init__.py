"""Decoding: from prompts to new tokens. Filters, sampling, the sampler, prompt lookup and beam search."""

from jaxgpt.config import BeamParams, SamplingParams
from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.decoding.sampler import Sampler
from jaxgpt.decoding.sampling import sample_token, warp

__all__ = ["BeamParams", "Sampler", "SamplingParams", "TokenBuffer", "sample_token", "warp"]
