"""Benchmarks: own times of nested events, kinds of instructions, traces of each platform, and the command."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import flags, jaxgpt, small
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.bench import limits, measure
from jaxgpt.bench.kinds import WORK, instruction_kinds
from jaxgpt.bench.trace import Event, device_time, own_times, record_trace
from jaxgpt.config import Config, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.counts import multiplied_parameters
from jaxgpt.model.params import abstract_params, count_parameters
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.plan.hlo import read_computations
from jaxgpt.presets import preset
from jaxgpt.progress import Progress
from jaxgpt.trainer.build import build


@pytest.fixture(autouse=True)
def strict_types() -> None:
    """Disable strict type promotion: these tests trace optax, which relies on it."""


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the peak and the bandwidth on small matrices."""
    monkeypatch.setattr(limits, "WIDTHS", {"cpu": (64,)})
    monkeypatch.setattr(limits, "BANDWIDTH_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(limits, "SECONDS", 0.01)


tree = st.recursive(st.just([]), lambda inner: st.lists(inner, min_size=1, max_size=4), max_leaves=20)


@given(st.lists(tree, min_size=1, max_size=5), st.randoms())
def test_own_times_exclude_nested_events(trees: Any, random: Any) -> None:
    """For any nesting and order of events, each second counts once: an event with its own time of 1 to 3 s holds others."""
    events: list[Event] = []
    expected: dict[str, float] = {}

    def lay(node: Any, start: int) -> int:
        name = f"event {len(expected)}"
        own = random.randint(1, 3)
        expected[name], end = own, start + own
        for child in node:
            end = lay(child, end)
        events.append(Event(start, end, name))
        return end

    end = 0
    for node in trees:
        end = lay(node, end)
    random.shuffle(events)
    assert dict(own_times(events)) == expected
    assert sum(expected.values()) == end


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8))
def test_own_times_of_overlapping_events_count_each_second_once(spans: list[tuple[int, int]]) -> None:
    events = [Event(start, start + length, "dot") for start, length in spans]
    covered = {second for start, length in spans for second in range(start, start + length)}
    own = [time for _, time in own_times(events)]
    assert min(own) >= 0
    assert sum(own) == len(covered)


def test_a_missing_trace_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.profiler, "trace", lambda *_, **__: nullcontext())
    with pytest.raises(ValueError, match="the profiler wrote no trace to"):
        record_trace(lambda: None, str(tmp_path))


def dots(optimizer: str) -> Counter[str]:
    """Count the products of a compiled step by kind, and check that all other kinds occur."""
    config = Config(model=small("gpt2", n_layer=1), optim=OptimConfig(name=optimizer), train=TrainConfig(batch_size=8))  # type: ignore[arg-type]
    program = build(config)
    batch = program.put(np.zeros((8, config.model.block_size + 1), np.int32))
    text = program.lower(program.abstract.state, batch).compile().as_text()
    kind_of = instruction_kinds(text)
    assert set(kind_of.values()) == set(WORK)
    computations, _ = read_computations(text)
    steps = [(name, each) for name, body in computations.items() for each in body.values()]
    fused = {each.called[0]: each.name for _, each in steps if each.opcode == "fusion"}
    return Counter(kind_of[fused.get(name, each.name)] for name, each in steps if each.opcode == "dot")


@pytest.mark.ci
def test_products_are_classified() -> None:
    """Attention has two products per layer, and four in its backward pass; the optimizer has products only with Muon."""
    adamw = dots("adamw")
    muon = dots("muon")
    assert adamw["attention"] == muon["attention"] == 6, "one layer"
    assert adamw["products"] == muon["products"] > 0
    assert adamw["optimizer"] == 0 < muon["optimizer"]


def test_a_library_product_in_a_gradient_is_a_product() -> None:
    """The path of a weight's gradient ends with its transposition."""
    text = """ENTRY %main (a: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2]{1,0} parameter(0)
  ROOT %dw.1 = f32[2,2]{1,0} custom-call(%a, %a), custom_call_target="__cublas$gemm", metadata={op_name="PATH"}
}"""
    path = "jit(train)/transpose(jvp(GPT))/GPT.blocks/h_0/mlp/up_proj/transpose"
    assert instruction_kinds(text.replace("PATH", path))["dw.1"] == "products"


def profile(planes: dict[str, dict[str, list[tuple[str, int, int]]]]) -> Any:
    """Make a profile: planes with lines of events, each with name, start and microseconds. GPU kernels have other names."""

    def event(name: str, start: int, length: int) -> SimpleNamespace:
        op = name.removeprefix("kernel of ")
        stats = [] if op == name else [("device", 0), ("hlo_op", op)]
        return SimpleNamespace(name=name, start_ns=1e3 * start, end_ns=1e3 * (start + length), stats=stats)

    def line(name: str, events: list[tuple[str, int, int]]) -> SimpleNamespace:
        return SimpleNamespace(name=name, events=[event(*each) for each in events])

    found = [
        SimpleNamespace(name=name, lines=[line(*each) for each in lines.items()]) for name, lines in planes.items()
    ]
    return SimpleNamespace(planes=found)


DOT = "dot.1"
FUSION = "%fusion.2 = f32[4]{0} fusion(...)"
TRACES = {
    # Threads of the host, and a fusion within a wait. libtpu adds a device without events.
    "cpu": {
        "/device:CUSTOM:Megascale Trace": {},
        "/host:CPU": {"a": [(DOT, 0, 4), ("Thread::wait", 4, 4), (FUSION, 5, 2)], "b": [(DOT, 6, 4)]},
    },
    # Kernels with the name of their instruction; events of the host are ignored.
    "gpu": {
        "/host:CPU": {"thread": [(DOT, 0, 99)]},
        "/device:GPU:0": {"Stream 1": [("kernel of dot.1", 0, 4), ("kernel of fusion.2", 5, 2)]},
        "/device:GPU:1": {"Stream 1": [("kernel of dot.1", 6, 4)]},
    },
    # Instructions, and lines that aggregate them.
    "tpu": {
        "/device:TPU:0": {"XLA Ops": [(DOT, 0, 4), (FUSION, 5, 2)], "Steps": [(DOT, 0, 10)]},
        "/device:TPU:1": {"XLA Ops": [(DOT, 6, 4)], "Steps": [(DOT, 0, 10)]},
    },
}


@pytest.mark.parametrize("platform", TRACES)
def test_traces_of_each_platform(platform: str) -> None:
    """Two devices have 8 us of products and 2 us of updates in a span of 10 us, so half of their time is idle."""
    shares = device_time(profile(TRACES[platform]), {"dot.1": "products", "fusion.2": "optimizer"}, devices=2)
    assert {kind: share for kind, share in shares.items() if share} == {"products": 0.4, "optimizer": 0.1, "idle": 0.5}


def test_a_trace_without_the_program_raises() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        device_time(profile({"/host:CPU": {"a": [("Thread::wait", 0, 1)]}}), {"dot.1": "products"}, devices=2)


TINY = flags(
    model__n_layer=1, model__norm="none", model__n_embd=32, model__n_head=2, model__block_size=16, train__batch_size=8
)


@pytest.mark.ci
@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.long), 3])
def test_the_command(each: int) -> None:
    """The results are consistent with each other and with the MFU formula, for any number of steps per call."""
    # The vocabulary comes from the chosen tokenizer, as in training.
    sizes = {"n_layer": 1, "norm": "none", "n_embd": 32, "n_head": 2, "block_size": 16}
    model = preset("python-char").with_model(vocab_size=256, **sizes).model
    data = flags(data__dataset="repeats", data__tokenizer="byte", train__steps_per_call=each)
    data += flags(train__compute_dtype="bfloat16")
    result = jaxgpt("bench", "python-char", *TINY, *data, "--seconds", "0.1", "--json")
    assert result.code == 0
    figures = json.loads(result.out)
    assert figures["parameters"] == count_parameters(model)

    step = figures["step"]
    limits = figures["limits"]
    assert step["tokens"] == 8 * 16
    assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["seconds"])
    rate = step["tokens_per_second"] * figures["flops_per_token"]
    assert step["mfu"] == pytest.approx(rate / limits["flops_per_second"])
    assert step["range"][0] <= step["seconds"] <= step["range"][1]
    assert step["steps"] % each == 0
    assert step["steps"] <= max(5 * each, 10 * 0.1 / step["seconds"]), "about --seconds, even if a batch takes longer"

    assert set(figures["where"]) == {*WORK, "idle"}
    assert sum(figures["where"].values()) == pytest.approx(1)
    assert all(0 <= share < 1 for share in figures["where"].values())

    decode = figures["decode"]
    assert (decode["prompt"], decode["new"]) == (8, 8)
    assert decode["weight_bytes"] == 2 * multiplied_parameters(model, abstract_params(model))
    least = decode["weight_bytes"] / limits["bytes_per_second"]
    assert decode["of_limit"] == pytest.approx(least / decode["token_seconds"])


@pytest.mark.ci
def test_the_command_prints_a_report_and_keeps_the_trace() -> None:
    result = jaxgpt("bench", "python-char", *TINY, "--seconds", "0.1", "--no-decode", "--trace", "profile")
    assert result.code == 0
    words = [line.split()[0] for line in result.out.splitlines()]
    assert words == ["model", "device", "start", "step", "peak", "where", *WORK, "idle", "host", "trace"]
    assert {file.name.split(".", 1)[1] for file in Path("profile").rglob("*.*")} >= {"xplane.pb", "trace.json.gz"}


@pytest.mark.ci
def test_idle_time_is_that_of_the_devices_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def device_time(trace: Any, kind_of: Any, devices: int) -> None:
        seen.append(devices)
        raise StopIteration

    monkeypatch.setattr(measure, "device_time", device_time)
    monkeypatch.setattr(measure, "record_trace", lambda *_: None)
    model = small("statquest", n_layer=1)
    with pytest.raises(StopIteration):
        measure.benchmark(Config(model=model, train=TrainConfig(batch_size=2), mesh=MeshConfig(data=2)), 0.0)
    assert seen == [2]


@pytest.mark.parametrize("each", [1, 2])
def test_a_gpu_traces_a_step_without_cuda_graphs(monkeypatch: pytest.MonkeyPatch, each: int) -> None:
    for module in (limits, measure):
        monkeypatch.setattr(module, "platform_of", lambda mesh: "gpu")
    monkeypatch.setattr(limits, "WIDTHS", {"gpu": (64,)})
    monkeypatch.setattr(limits, "BANDWIDTH_BYTES", {"gpu": 2**22})
    train = TrainConfig(batch_size=2, steps_per_call=each)
    stages = list[str]()
    progress = Progress()
    monkeypatch.setattr(progress, "stage", stages.append)
    config = Config(model=small("gpt2", n_layer=1), train=train, mesh=MeshConfig(data=1))
    found = measure.benchmark(config, 0.0, decode=False, progress=progress)
    assert "compiling without CUDA graphs" in stages
    assert found["where"]["idle"] < 0.9


def test_peak_on_any_number_of_devices() -> None:
    assert limits.product_peak(make_mesh(MeshConfig(data=3)), "float32") > 0


@pytest.mark.parametrize(("platform", "calls"), [("cpu", 1), ("gpu", 10)])
def test_accelerators_have_a_queue_of_work(monkeypatch: pytest.MonkeyPatch, platform: str, calls: int) -> None:
    """The time of one dispatch and one wait is divided among the calls of a sample."""
    done: list[str] = []
    block = jax.block_until_ready
    monkeypatch.setattr(limits, "platform_of", lambda mesh: platform)
    monkeypatch.setattr(limits, "WIDTHS", {platform: (8,)})
    monkeypatch.setattr(jax, "jit", lambda f, **_: lambda *args: done.append("call") or f(*args))
    monkeypatch.setattr(jax, "block_until_ready", lambda x: done.append("wait") or block(x))
    limits.product_peak(make_mesh(MeshConfig(data=1)), "float32")
    samples = "".join(done).split("wait")[1:-1]  # after the matrices and the first call
    assert set(samples) == {"call" * calls}
