"""RoPE divisors in GGUF files, and the Llama 3 scaling that they represent.

Some files lack the original context. All files lack the lower and upper factors, which must have their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.ops.rotary import Llama3Scaling, rope_frequencies

ROPE_DIVISORS = "rope_freqs.weight"  # divisors of the RoPE frequencies, float32 [H / 2]
ORIGINAL_CONTEXT = "rope.scaling.original_context_length"


def read_divisors(values: Mapping[str, Any], divisors: np.ndarray, where: str) -> dict[str, Any]:
    """Return the settings of the Llama 3 scaling that produces the divisors of a file; raise `UserError` for other divisors."""
    theta = values.get("rope.freq_base", 10_000.0)
    if type(theta) is float and theta > 0 and divisors.size and divisors.min() > 0:
        for context in _contexts(values, divisors, theta):
            scaling = Llama3Scaling(factor=float(divisors.max()), original_context=context)
            if np.allclose(divisors, rope_divisors(2 * divisors.size, theta, scaling), rtol=1e-4):
                return {"rope_factor": scaling.factor, "rope_original_context": context}
    raise UserError(f"{where}: {ROPE_DIVISORS} is not the scaling of Llama 3: import a directory of safetensors")


def _contexts(values: Mapping[str, Any], divisors: np.ndarray, theta: float) -> list[int]:
    """List original contexts to try: from the metadata, from Llama 3, and from a divisor between 1 and the factor."""
    contexts = [values.get(ORIGINAL_CONTEXT), 8192]
    factor = divisors.max()
    between = np.flatnonzero((divisors > 1.0) & (divisors < factor))
    if between.size:
        i = between[0]
        kept = (1 / divisors[i] - 1 / factor) / (1 - 1 / factor)
        wavelength = 2 * np.pi * theta ** (i / divisors.size)
        contexts.append(round(wavelength * (1.0 + 3.0 * float(kept))))
    return [context for context in contexts if type(context) is int and 0 < context <= 2**24]


def rope_divisors(width: int, theta: float, scaling: Llama3Scaling) -> np.ndarray:
    """Compute the divisors of the RoPE frequencies of Llama 3 scaling, float32 `[width / 2]`."""
    plain = rope_frequencies(width, theta, Llama3Scaling())
    scaled = rope_frequencies(width, theta, scaling)
    return np.asarray(plain / scaled, np.float32)
