"""llama.cpp architectures: the transformers family of each, and what llama.cpp computes regardless of the file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from jaxgpt.convert import experts, gemma, gpt2, llama, neox
from jaxgpt.convert.family import Family
from jaxgpt.errors import UserError

# Metadata keys, without the name of the architecture.
RMS_EPS = "attention.layer_norm_rms_epsilon"
LAYER_EPS = "attention.layer_norm_epsilon"
WIDTH = "feed_forward_length"  # width of the MLP
SOFTCAP = "final_logit_softcapping"


class SlidingWindows(NamedTuple):
    """Default sliding windows of an architecture.

    Attributes:
        period: length of the repeated pattern of layers; only the last layer of the pattern has no window.
        theta: RoPE base in layers with a window; 0: the base of the other layers.
    """

    period: int
    theta: float = 0.0


class ExpertRules(NamedTuple):
    """The experts in the graph and the metadata of an architecture.

    Attributes:
        normalized: whether its graph divides the scores of a token's experts by their sum.
        width: metadata key of the width of each expert.
    """

    normalized: bool
    width: str = WIDTH


class Architecture(NamedTuple):
    """A llama.cpp architecture.

    Attributes:
        name: `general.architecture`.
        family: transformers family with the same tensors.
        activation: activation in its graph; no metadata key changes it.
        eps: metadata key of the epsilon of norms.
        interleaved: whether RoPE rotates adjacent channels of a head, so that rows of queries and keys are reordered.
        windows: default sliding windows; None: its graph has no windows.
        may_tie: whether a file may lack the head, which then equals the embedding.
        may_widen_heads: whether the head width may differ from the model width per head.
        may_share_heads: whether query heads may share a key/value head.
        expert_rules: its experts; None: its graph has no experts.
        reads_divisors: whether its graph reads the tensor `ROPE_DIVISORS`.
        rotates_part: whether RoPE may rotate fewer channels than a head has.
        scales_queries: whether its graph divides the scores by a different number than the family (`_query_factor`).
        more_keys: metadata keys besides `llamacpp.metadata.KEYS`, in the same form.
    """

    name: str
    family: Family
    activation: str = "silu"
    eps: str = RMS_EPS
    interleaved: bool = False
    windows: SlidingWindows | None = None
    may_tie: bool = True
    may_widen_heads: bool = True
    may_share_heads: bool = True
    expert_rules: ExpertRules | None = None
    reads_divisors: bool = False
    rotates_part: bool = False
    scales_queries: bool = False
    more_keys: Mapping[str, tuple[str, Any]] = MappingProxyType({})


GELU: Literal["gelu_new"] = "gelu_new"  # llama.cpp computes GELU with tanh
ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", llama.LLAMA, interleaved=True, reads_divisors=True),  # also Mistral
        Architecture("qwen2", llama.QWEN2, may_widen_heads=False),
        Architecture("qwen3", llama.QWEN3),
        Architecture("olmo2", llama.OLMO2, windows=SlidingWindows(period=4), may_tie=False, may_widen_heads=False),
        Architecture(
            "gemma3",
            gemma.FAMILY,
            activation=GELU,
            windows=SlidingWindows(period=6, theta=10_000.0),
            scales_queries=True,
            more_keys={SOFTCAP: ("logit_softcap", 0.0)},
        ),
        Architecture("gpt2", gpt2.FAMILY, activation=GELU, eps=LAYER_EPS),
        Architecture(
            "gptneox",
            neox.FAMILY,
            activation=GELU,
            eps=LAYER_EPS,
            may_tie=False,
            rotates_part=True,
            more_keys={"use_parallel_residual": ("parallel_residual", bool)},
        ),
    )
}
# Architectures with experts. A file of "llama" has experts if its `expert_count` is not 0.
WITH_EXPERTS = {
    each.name: each
    for each in (
        Architecture(
            "llama", experts.MIXTRAL, interleaved=True, expert_rules=ExpertRules(normalized=True), reads_divisors=True
        ),
        Architecture(
            "qwen3moe", experts.QWEN3_MOE, expert_rules=ExpertRules(normalized=True, width="expert_feed_forward_length")
        ),
        Architecture(
            "olmoe",
            experts.OLMOE,
            may_tie=False,
            may_widen_heads=False,
            may_share_heads=False,
            expert_rules=ExpertRules(normalized=False),
        ),
    )
}


def architecture_of(name: str) -> Architecture:
    """Return the architecture of a transformers family; raise `UserError` if llama.cpp has no such architecture."""
    if name == llama.MISTRAL.name:
        return ARCHITECTURES["llama"]
    for architecture in (*ARCHITECTURES.values(), *WITH_EXPERTS.values()):
        if name == architecture.family.name:
            return architecture
    raise UserError(f"{name} models cannot be written as a GGUF file: export a directory")
