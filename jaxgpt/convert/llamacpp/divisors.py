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
LLAMA3_CONTEXT = 8192  # original context of Llama 3
MAX_CONTEXT = 2**24
LOW = Llama3Scaling().low
HIGH = Llama3Scaling().high


def read_divisors(values: Mapping[str, Any], divisors: np.ndarray, where: str) -> dict[str, Any]:
    """Return the settings of the Llama 3 scaling that produces the divisors of a file.

    Args:
        values: metadata of the file, without the name of the architecture in its keys.
        divisors: content of `ROPE_DIVISORS`, float32 `[H / 2]`.
        where: path of the file, for errors.

    Raises:
        UserError: if the divisors come from a different scaling.
    """
    theta = values.get("rope.freq_base", 10_000.0)
    has_base = type(theta) is float and theta > 0
    are_positive = divisors.size > 0 and divisors.min() > 0
    if has_base and are_positive:
        factor = float(divisors.max())
        for context in _contexts(values, divisors, theta):
            expected = rope_divisors(2 * divisors.size, theta, Llama3Scaling(factor, original_context=context))
            if np.allclose(divisors, expected, rtol=1e-4):
                return {"rope_factor": factor, "rope_original_context": context}
    raise UserError(f"{where}: {ROPE_DIVISORS} does not match Llama 3 scaling: import a directory of safetensors")


def _contexts(values: Mapping[str, Any], divisors: np.ndarray, theta: float) -> list[int]:
    """List original contexts to try: from the metadata, from Llama 3, and from a divisor."""
    contexts = [values.get(ORIGINAL_CONTEXT), LLAMA3_CONTEXT, _context_of_divisors(divisors, theta)]
    return [context for context in contexts if type(context) is int and 0 < context <= MAX_CONTEXT]


def _context_of_divisors(divisors: np.ndarray, theta: float) -> int | None:
    """Compute the original context C from a divisor d between 1 and the factor s; None: no divisor is between them.

    `Llama3Scaling` keeps the fraction k of a frequency, `1/d = k + (1 - k)/s`, with `k = (C/w - low) / (high - low)` for the
    wavelength w. So `k = (1/d - 1/s) / (1 - 1/s)`, and `C = w (low + k (high - low))`.
    """
    factor = divisors.max()
    between = np.flatnonzero((divisors > 1.0) & (divisors < factor))
    if not between.size:
        return None
    i = between[0]
    kept = (1 / divisors[i] - 1 / factor) / (1 - 1 / factor)
    wavelength = 2 * np.pi * theta ** (i / divisors.size)
    return round(wavelength * (LOW + float(kept) * (HIGH - LOW)))


def rope_divisors(width: int, theta: float, scaling: Llama3Scaling) -> np.ndarray:
    """Compute the divisors of the RoPE frequencies of Llama 3 scaling, float32 `[width / 2]`."""
    plain = rope_frequencies(width, theta, Llama3Scaling())
    scaled = rope_frequencies(width, theta, scaling)
    return np.asarray(plain / scaled, np.float32)
