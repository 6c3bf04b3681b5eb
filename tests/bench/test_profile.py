"""Profile: the trace has the steps and the layers, and tracing does not change the weights."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import TEXT, small_run

from jaxgpt.bench.layers import layer_of
from jaxgpt.bench.profile import Profile
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.loop import train
from jaxgpt.trainer.start import Start


def weights(listener: Listener, out: str, **settings: Any) -> list[bytes]:
    Path("text.txt").write_text(TEXT)
    outcome = train(Start(small_run(**settings), out=out), listener)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(outcome.state)]


@pytest.mark.ci
def test_a_trace_has_the_steps_and_the_layers_and_the_weights_are_equal() -> None:
    notes: list[str] = []
    settings = {"steps": 12, "eval_every": 12}
    traced = weights(Profile(4, notes.append), "run", **settings)
    assert traced == weights(Listener(), "plain", **settings)
    [perfetto] = Path("run/profile").rglob("perfetto_trace.json.gz")
    [xplane] = Path("run/profile").rglob("*.xplane.pb")
    assert notes == [f"wrote a trace of 4 steps: xprof run/profile, or {perfetto}"]

    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    steps = {int(event["args"]["step_num"]) for event in events if event.get("name") == "train"}
    assert steps == {5, 6, 7, 8}, "steps 3 and 4 were in flight when the trace started"
    instructions = [
        event["args"] for event in events if event.get("args", {}).get("hlo_module", "").startswith("jit_train")
    ]
    runs = Counter(instruction["hlo_op"] for instruction in instructions)
    assert min(runs.values()) >= 4, "every instruction of the step runs in each of the 4 steps"
    layers = {event.get("name", "").split(" ")[0] for event in events}
    assert {"wte", "h_0/attn/q_proj", "h_0/attn/k_proj", "h_0/attn/v_proj", "h_0/attn"} <= layers
    assert b"h_0/attn" in xplane.read_bytes()


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("jit(train)/shard_map/jvp(GPT.loss)/GPT.blocks/h_0/attn/attn._project/q_proj/dot_general", "h_0/attn/q_proj"),
        (
            "jit(train)/transpose(jvp(GPT))/GPT.blocks/h_0/h_0.feed_forward/mlp/up_proj/dot_general",
            "h_0/mlp/up_proj backward",
        ),
        ("jit(train)/jvp(GPT)/h_0/attn/BTKGH,BKSH->BKGTS/dot_general", "h_0/attn"),
        ("jit(train)/while/body/closed_call/h/mlp/up_proj/add", "h/mlp/up_proj"),
        ("jit(train)/checkpoint/rematted_computation/h_0/mlp/add;jit(train)/h_1/mlp/mul", "h_0/mlp"),
        ("jit(train)/while/cond/lt", ""),
        ("jit(train)/add", ""),
        ("", ""),
    ],
)
def test_the_layer_of_a_path(path: str, layer: str) -> None:
    assert layer_of(path) == layer


class Calls:
    """Stands in for JAX's profiler, and records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.log: list[str] = []
        self.error = error
        monkeypatch.setattr(jax.profiler, "start_trace", self.start)
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: self.log.append("stop"))

    def start(self, *_: Any, **options: Any) -> None:
        assert options["create_perfetto_trace"]
        self.log.append("start")
        if self.error:
            raise self.error


def run_steps(profile: Profile, steps: int, calls: Calls, per_call: int = 1) -> None:
    """Pass the events of a run."""
    config = small_run(steps_per_call=per_call)
    program: Any = type("Program", (), {"config": config})
    run: Any = type("Run", (), {"path": Path("run")})
    profile.started(program, None, run, 0)  # type: ignore[arg-type]
    for step in range(steps):
        profile.progress({"step": step})
        calls.log.append(str(step))
    profile.finished(None)  # type: ignore[arg-type]


def test_steps_that_began_before_the_trace_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the metrics of step 2 are read, its call may include steps 3 to 5, and two more calls of 4 steps are in flight."""
    calls = Calls(monkeypatch)
    run_steps(Profile(3, print), 18, calls, per_call=4)
    numbers = [str(step) for step in range(18)]
    assert calls.log == ["0", "1", "start", *numbers[2:16], "stop", "16", "17"]


def test_a_run_that_ends_early_keeps_what_was_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    notes: list[str] = []
    run_steps(Profile(10, notes.append), 7, calls)
    assert calls.log == [*"01", "start", *"23456", "stop"]
    assert notes == ["wrote a trace of 2 steps: xprof run/profile, or run/profile"]


def test_a_run_that_is_too_short_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    notes: list[str] = []
    run_steps(Profile(10, notes.append), 2, calls)
    assert (calls.log, notes) == (["0", "1"], ["no profile: the run took 2 steps, and the first 5 are not traced"])


def test_a_run_that_fails_before_its_start_has_no_note_on_the_profile() -> None:
    notes: list[str] = []
    Profile(3, notes.append).failed(ValueError("no data"))
    assert notes == []


@pytest.mark.parametrize(("steps", "per_call", "before"), [(5, 1, 5), (30, 10, 32)])
def test_a_trace_without_a_complete_step_is_no_profile(
    steps: int, per_call: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    notes: list[str] = []
    profile = Profile(4, notes.append)
    run_steps(profile, steps, calls, per_call)
    assert calls.log[-1] == "stop"
    assert notes == [f"no profile: the run took {steps} steps, and the first {before} are not traced"]
    assert profile.steps == 4


def test_an_error_of_the_profiler_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that the user has started before the run continues."""
    calls = Calls(monkeypatch, RuntimeError("Only one profile may be run at a time."))
    notes: list[str] = []
    run_steps(Profile(2, notes.append), 6, calls)
    assert calls.log == [*"01", "start", *"2345"]
    assert notes == ["no profile: RuntimeError: Only one profile may be run at a time."]
