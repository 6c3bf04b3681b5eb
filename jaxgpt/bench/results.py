"""The results of a benchmark, as in `jaxgpt bench --json`. Times are in seconds; times of repeated measurements are medians."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class StartSeconds(TypedDict):
    """Time of each stage of the start of a run."""

    weights: float
    traced: float
    compiled: float  # time to compile the step, or to load it from the compilation cache
    first_step: float


class StepResults(TypedDict):
    """Results of the measured training steps."""

    seconds: float
    range: list[float]  # minimum and maximum of `seconds`
    steps: int
    tokens: int  # tokens of a step
    tokens_per_second: float
    mfu: float
    temporary_bytes: int  # memory of the compiled step, excluding its arguments and results


class PeakRates(TypedDict):
    """Measured peak rates of all devices together."""

    flops_per_second: float  # matrix products in the compute dtype
    bfloat16_flops_per_second: float
    bytes_per_second: float  # reading memory


class DecodeResults(TypedDict):
    """Results of greedy decoding of one sequence."""

    prompt: int  # tokens of the prompt
    new: int  # generated tokens
    dtype: str
    first_call_seconds: float  # time to generate the first text, including compilation
    first_token_seconds: float
    token_seconds: float  # time of each further token
    tokens_per_second: float
    weight_bytes: int  # bytes of the weight matrices that each token reads
    of_limit: float  # share of the speed that the memory bandwidth allows


class BenchResults(TypedDict):
    """Results of a benchmark."""

    device: str
    devices: int
    jax: str  # version
    parameters: int
    compute_dtype: str
    start_seconds: StartSeconds
    step: StepResults
    where: dict[str, float]  # share of device time of each kind of work
    input_seconds: float  # time to prepare a batch and put it on the devices, per step
    limits: PeakRates
    flops_per_token: int
    decode: NotRequired[DecodeResults]
