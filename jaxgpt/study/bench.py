"""How fast a config trains and generates on the devices at hand, what they could do at most, and where the time goes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxgpt.config import Config, UserError
from jaxgpt.data import Windows
from jaxgpt.data.tokens import Tokens
from jaxgpt.decoding import DecodeSession, SamplingParams
from jaxgpt.lm import model_functions
from jaxgpt.model import GPT
from jaxgpt.model.params import abstract_params, init_params
from jaxgpt.ops.quantize import quantize
from jaxgpt.study.limits import product_peak, read_bandwidth
from jaxgpt.study.trace import kinds, spent, traced
from jaxgpt.trainer.loop import LAG
from jaxgpt.trainer.metrics import flops_per_token, multiplied_parameters, parameter_count
from jaxgpt.trainer.program import Program, build

PROMPT, NEW = 16, 128  # tokens of the sample, where the context has room for them
TRACED = 1.0  # seconds of steps in a trace: two to ten steps
HIT = "/jax/compilation_cache/cache_hits"


def bench(config: Config, seconds: float, decode: bool = True, say: Callable[[str], Any] = str) -> dict[str, Any]:
    """Measure start, step, host, limits and decoding of a config whose vocabulary is known, on windows of random ids.

    `MFU = tokens/s (6 P + 12 L N H T) / peak` (`flops_per_token`), the peak being that of products in the run's type.

    Args:
        config: the run.
        seconds: of steps.
        decode: whether to generate, too.
        say: told what is done next.

    Raises:
        UserError: the config does not fit the devices, or the context has no room for a sample.
    """
    if decode and config.model.block_size < 3:
        raise UserError(f"a sample needs a model.block_size of at least 3, not {config.model.block_size}: --no-decode")
    stages: dict[str, float] = {}
    say("compiling")
    with _timed(stages, "weights"):
        program = build(config)
        state = jax.block_until_ready(program.init())
    worker = _Steps(program, state)
    kept = _cache_hits()
    with _timed(stages, "traced"):
        lowered = program.lower(state, worker.batch())
    with _timed(stages, "compiled"), kept as hits:
        compiled = program.compile(lowered)
    with _timed(stages, "first_step"):
        worker.run(1, each=1)
    say(f"training for {seconds:g} s")
    worker.run(2)
    times = worker.run(seconds=seconds)
    step = statistics.median(times)
    count = min(max(round(TRACED / (step * worker.each)), 2), 10)
    where = spent(traced(lambda: worker.run(count)), kinds(compiled.as_text() or ""), jax.local_device_count())
    tokens = config.train.batch_size * config.model.block_size
    say("measuring what the devices can do")
    peak = product_peak(program.mesh, config.train.compute_dtype)
    bandwidth = read_bandwidth(program.mesh)
    params, memory = worker.state.params, compiled.memory_analysis()
    flops = flops_per_token(config.model, params)
    device = program.mesh.devices.flat[0]
    figures: dict[str, Any] = {
        "device": device.device_kind if device.platform != "cpu" else "cpu",
        "devices": program.mesh.size,
        "jax": jax.__version__,
        "parameters": parameter_count(params),
        "compute_dtype": config.train.compute_dtype,
        "start_seconds": stages | {"from_cache": bool(hits)},
        "step": {
            "seconds": step,
            "range": [min(times), max(times)],
            "steps": len(times) * worker.each,
            "tokens": tokens,
            "tokens_per_second": tokens / step,
            "mfu": tokens / step * flops / peak,
            "temporary_bytes": memory.temp_size_in_bytes if memory else 0,
        },
        "where": where.shares,
        "input_seconds": statistics.median(worker.fed),
        "limits": {"flops_per_second": peak, "bytes_per_second": bandwidth},
        "flops_per_token": flops,
    }
    if decode:
        say("generating")
        figures["decode"] = _decode(program, bandwidth)
    return figures


class _Steps:
    """Training as the loop does it, on random ids: the host is some steps ahead of the devices."""

    def __init__(self, program: Program, state: Any) -> None:
        config = program.config
        T, V = config.model.block_size, config.model.vocab_size
        ids = np.random.default_rng(0).integers(0, V, max(1 << 20, 4 * T), np.int32)
        self.program, self.state = program, state
        self.windows = Windows(Tokens([ids]), T, config.train.seed, config.data.sampling, config.data.stride)
        self.step = 0
        self.each = config.train.steps_per_call
        self.fed: list[float] = []  # seconds in which the host made each batch

    def batch(self, each: int = 1) -> jax.Array:
        """What the next call takes for so many steps."""
        size = self.program.config.train.batch_size
        return self.program.batches(each, lambda ahead, rows: self.windows.batch_at(self.step + ahead, size, rows))

    def run(self, calls: int = 0, seconds: float = 0.0, each: int = 0) -> list[float]:
        """So many calls, or as many as there are in so many seconds, five at least; the seconds of a step in each.

        Args:
            calls: 0: by time.
            seconds: of them.
            each: steps of a call; 0: as many as training makes.
        """
        each = each or self.each
        pending: deque[Any] = deque()
        times: list[float] = []
        begin = last = time.perf_counter()

        def read(leave: int) -> None:
            nonlocal last
            while len(pending) > leave:
                pending.popleft()()
                now = time.perf_counter()
                times.append((now - last) / each)
                last = now

        for count in range(calls or 1_000_000):
            if not calls and count >= 5 and time.perf_counter() - begin > seconds:
                break
            start = time.perf_counter()
            batch = self.batch(each)
            self.fed.append((time.perf_counter() - start) / each)
            self.state, figures = self.program.advance(self.state, batch, each)
            self.step += each
            pending.append(figures)
            read(LAG)
        read(0)
        # The first was begun with nothing under way; of the last ones, some had ended before they were asked for.
        return times[1:-LAG] if len(times) > LAG + 1 else times


def _decode(program: Program, bandwidth: float) -> dict[str, Any]:
    """One sequence, greedily, with weights as `jaxgpt sample` lays them out, on one device.

    The limit is what memory allows: every token reads all weights that are multiplied with.
    """
    config = program.config.model
    one = jax.sharding.SingleDeviceSharding(program.mesh.devices.flat[0])
    init = jax.jit(lambda: init_params(GPT(config)), out_shardings=one)
    weights = quantize(init(), "float32")
    model = model_functions(config, program.config.train.compute_dtype)
    prompt = min(PROMPT, config.block_size // 2)
    new = min(NEW, config.block_size - prompt)

    def generate() -> tuple[float, float]:
        session = DecodeSession(
            weights, [[0] * prompt], jax.random.split(jax.random.key(0), 1), [new],
            model=model, sampling=SamplingParams(temperature=0), context=config.block_size,
        )  # fmt: skip
        start = time.perf_counter()
        session.next_tokens(1)
        first = time.perf_counter()
        session.next_tokens(new - 1)
        return first - start, (time.perf_counter() - first) / (new - 1)

    start = time.perf_counter()
    generate()
    compiled = time.perf_counter() - start
    firsts, tokens = zip(*(generate() for _ in range(3)), strict=True)
    read = 4 * multiplied_parameters(config, abstract_params(config))
    token = statistics.median(tokens)
    return {
        "prompt": prompt,
        "new": new,
        "first_call_seconds": compiled,
        "first_token_seconds": statistics.median(firsts),
        "token_seconds": token,
        "tokens_per_second": 1 / token,
        "weight_bytes": read,
        "of_limit": read / bandwidth / token,
    }


@contextmanager
def _timed(stages: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    stages[name] = time.perf_counter() - start


@contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """Programs that came from the cache of compiled programs meanwhile."""
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)
