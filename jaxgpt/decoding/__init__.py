"""Logits -> the next token: policies and the scan sampler."""

from jaxgpt.decoding.policy import Policy, choose, warp
from jaxgpt.decoding.sampler import SamplerState, sample

__all__ = ["Policy", "SamplerState", "choose", "sample", "warp"]
