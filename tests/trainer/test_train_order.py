"""The order of events of `train`, simulated: steps, metrics, evaluations, checkpoints, stops, failures and resumes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from jaxgpt.checkpoint.info import Info
from jaxgpt.config import TrainConfig
from jaxgpt.errors import TrainingFailed
from jaxgpt.presets import preset
from jaxgpt.train.step import TrainState
from jaxgpt.trainer import loop, run_evaluation, saving
from jaxgpt.trainer import record as record_module
from jaxgpt.trainer.calls import is_evaluated, plan_calls
from jaxgpt.trainer.evaluators import Measured, Watch
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.loop import Start, train
from jaxgpt.trainer.record import LAG
from jaxgpt.trainer.saving import RunRequest

CONFIG = preset("statquest").with_model(vocab_size=5)
CASES = 300


@dataclass
class Case:
    """One simulated run."""

    train: TrainConfig
    last: Info | None = None  # checkpoint to resume from; None: a new run
    stop: int | None = None  # number of events after which a signal arrives
    save: frozenset[int] = frozenset()  # numbers of events after which a checkpoint is due
    bad: int | None = None  # step with a NaN loss
    until: int | None = None  # argument of `train`, the step to stop at
    # ("steps", first, n), ("read", step), ("line", step, kind), ("evaluated", step), ("save", step, val_loss, temporary) and
    # ("note", step), in order
    events: list[tuple[Any, ...]] = field(default_factory=list)
    # (call, number of events before it): "enter room", "exit room" and "trim"
    memory: list[tuple[str, int]] = field(default_factory=list)

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]


def state_at(step: int) -> TrainState:
    return TrainState(step, SimpleNamespace(step=step), None, None)  # type: ignore[arg-type]


def simulate(case: Case, patch: pytest.MonkeyPatch) -> Any:
    """Run `train` without files and devices; return its outcome, None if training failed."""
    log = case.events.append
    config = replace(CONFIG, train=case.train)

    class Simulated(Listener):
        def progress(self, metrics: dict[str, float]) -> None:
            log(("read", metrics["step"]))

        def evaluated(self, step: int, result: Any) -> None:
            log(("evaluated", step))

    class Program:
        mesh = model = None
        abstract = SimpleNamespace(weights=None, state=SimpleNamespace(params={}))
        batches = SimpleNamespace(microbatches=SimpleNamespace(rows=case.train.batch_size))
        given: ClassVar[dict[str, str]] = {}

        def init(self) -> Any:
            return state_at(0)

        def restore(self, directory: Path, step: int) -> Any:
            return state_at(step)

        def step(self, state: Any, batches: range) -> Any:
            assert batches.start == state.step
            log(("steps", state.step, len(batches)))
            losses = np.array([math.nan if step == case.bad else 1.0 for step in batches])
            metrics = {"loss": losses, "grad_norm": np.ones(len(batches)), "grad_squares": np.zeros((len(batches), 0))}
            return state_at(batches.stop), metrics

        def to_checkpoint(self, state: Any) -> Any:
            return state

    Program.config = config  # type: ignore[attr-defined]

    class Saver:
        directory = Path("none")

        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Saver:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def wait(self) -> None: ...
        def check(self) -> None: ...
        def save_info(self, info: Info) -> None:
            log(("note", info.step))

        def save(self, state: Any, info: Info) -> None:
            assert state.step == info.step
            assert info.tokens == info.step * case.train.batch_size * config.model.block_size
            log(("save", info.step, info.ranking, info.temporary))

    class File(Saver):
        elapsed_seconds = 0.0

        def write(self, **values: float) -> None:
            if "started" not in values:
                log(("line", values["step"], "val_loss" if "val_loss" in values else "loss"))

        def end(self, step: int, ended: str) -> None:
            log(("end", step, ended))

    class Poll:
        def __init__(self, *_: Any) -> None: ...
        def forget(self) -> None: ...
        def ask(self, request: int) -> int:
            stops = case.stop is not None and len(case.events) >= case.stop
            saves = len(case.events) in case.save
            return RunRequest.STOP if stops else RunRequest.SAVE if saves else RunRequest.NONE

    @contextmanager
    def opened_run(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(checkpoints=Path("none"), metrics=None, path=Path("run"))

    def evaluate(program: Any, params: Any, watch: Watch) -> Any:
        assert watch.final == (params.step == case.train.steps)
        return None if watch.interrupted() else Measured({"val_loss": 1.0}, 1.0)

    @contextmanager
    def batches_of(program: Any, feed: Any, calls: Any, wait: Any) -> Iterator[Any]:
        yield ((steps, lambda state, steps=steps: steps) for steps in calls)

    def remember(call: str) -> None:
        case.memory.append((call, len(case.events)))

    @contextmanager
    def room_for_temporaries(mesh: Any, compiled: Any) -> Iterator[None]:
        assert compiled == "compiled step"
        remember("enter room")
        yield
        remember("exit room")

    data = SimpleNamespace(
        train=(),
        val=(),
        held_out=False,
        tokenizer=CONFIG.model,
        fingerprint="",
        sources=(),
        check=lambda config: None,
        facts=dict,
    )
    stubs = {
        "batches_of": batches_of,
        "compiling": lambda *_: nullcontext(SimpleNamespace(result=lambda: "compiled step")),
        "room_for_temporaries": room_for_temporaries,
        "newest_checkpoint": lambda start, note: case.last,
        "opened_run": opened_run,
        "with_data_facts": lambda config, data, last: config,
        "MetricsFile": File,
        "Saver": Saver,
    }
    for name, stub in stubs.items():
        patch.setattr(loop, name, stub)
    patch.setattr(run_evaluation, "trim_memory", lambda: remember("trim"))
    for name in ("flops_per_token", "peak_flops"):
        patch.setattr(record_module, name, lambda *_: 0)
    patch.setattr(saving, "Poll", Poll)
    patch.setattr(record_module, "provenance", lambda: {"started": ""})
    patch.setattr(saving.Checkpoints, "_check_run", lambda self: None)  # no run is on the disk
    try:
        parts = {
            "build": lambda *_, **__: Program(),
            "feed": lambda *_: SimpleNamespace(at=None, spec=None, reads_state=False, interrupted=False),
        }
        start = Start(config, data=data, evaluators=(evaluate,), **parts)  # type: ignore
        return train(start, Simulated(), case.until)
    except TrainingFailed:
        return None


def random_case(dice: random.Random) -> Case:
    steps = dice.randint(1, 25)
    settings = replace(
        CONFIG.train, steps=steps, eval_every=dice.choice([1, 3, 5, 7, 10, 30]),
        checkpoint_every=dice.choice([0, 0, 2, 4, 5]), steps_per_call=dice.choice([1, 2, 5, 8]),
        log_every=dice.choice([1, 3, 10]), checkpoint_seconds=0.0,
    )  # fmt: skip
    first = dice.choice([0, 0, dice.randint(0, steps)])
    tokens = first * settings.batch_size * CONFIG.model.block_size
    val_loss, about = dice.choice([None, 1.0]) if first else None, {"config": asdict(CONFIG)}
    last = Info(first, val_loss, tokens, about=about) if first or dice.random() < 0.1 else None
    return Case(
        settings,
        last,
        save=frozenset(dice.sample(range(30), dice.choice([0, 0, 1, 3]))),
        until=dice.choice([None, None, dice.randint(max(first, 1), steps)]),
        stop=dice.choice([None, dice.randint(0, 60)]),
        bad=dice.choice([None, None, dice.randint(0, steps)]),
    )


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.long if s else ()) for s in range(10)])
def test_the_laws_of_a_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    for _ in range(CASES):
        case = random_case(dice)
        outcome = simulate(case, monkeypatch)
        check_steps(case)
        check_metrics(case)
        check_checkpoints(case, outcome)
        check_end(case, outcome)


def check_steps(case: Case) -> None:
    """Steps are consecutive. The first is alone, and no call has too many steps or crosses an evaluation or a checkpoint."""
    done = first = case.last.step if case.last else 0
    for start, n in case.of("steps"):
        assert start == done
        assert n <= (1 if start == first else case.train.steps_per_call)
        crossed = range(start + 1, start + n)
        assert not [s for s in crossed if s % case.train.eval_every == 0]
        assert not [s for s in crossed if case.train.checkpoint_every and s % case.train.checkpoint_every == 0]
        done += n


def check_metrics(case: Case) -> None:
    """Each step is read once, in order, at most `LAG` calls late, and before an evaluation or a checkpoint after it."""
    taken, read = list[range](), case.last.step if case.last else 0
    for kind, *values in case.events:
        if kind == "steps":
            taken.append(range(values[0], sum(values)))
            assert len([call for call in taken[:-1] if call.stop > read]) <= LAG
        elif kind == "read":
            assert values == [read]
            assert values != [case.bad]
            read += 1
        elif kind in ("evaluated", "save") and taken:
            assert read == taken[-1].stop
    logged = {s for (s,) in case.of("read") if s % case.train.log_every == 0 or s == case.train.steps - 1}
    assert [s for s, kind in case.of("line") if kind == "loss"] == sorted(logged)


def check_checkpoints(case: Case, outcome: Any) -> None:
    """Steps are evaluated and saved once, with their loss, when due; all other checkpoints have no loss."""
    first = case.last.step if case.last else 0
    done = sum(n for _, n in case.of("steps")) + first
    saved = [step for step, *_ in case.of("save")]
    assert saved == sorted(set(saved) - ({first} if case.last else set()))
    assert first not in saved or case.stop is not None, "a timer saves after the first step"
    for step, loss, temporary in case.of("save"):
        assert (loss is not None) == ((step,) in case.of("evaluated"))
        assert not (temporary and loss is not None)
    assert case.of("note") == ([(first,)] if (first,) in case.of("evaluated") and case.last else [])
    due = [s for s in range(first + 1, done + 1) if is_evaluated(s, case.train)]
    if case.last and first and case.last.ranking is None and is_evaluated(first, case.train):
        due.insert(0, first)
    evaluated = [s for (s,) in case.of("evaluated")]
    assert evaluated == due[: len(evaluated)]
    if outcome is not None:
        assert len(due) - len(evaluated) <= (case.stop is not None), "only a stop prevents the last one"
        every = case.train.checkpoint_every
        assert {s for s in range(first + 1, done) if every and s % every == 0} <= set(saved)
        assert done in {*saved, first if case.last else None}


def check_end(case: Case, outcome: Any) -> None:
    """A run fails at a bad step, ends at the last step or `until`, or stops early on request; its last event has the reason."""
    *_, (kind, done, ended) = case.events
    assert kind == "end"
    assert len(case.of("end")) == 1
    if outcome is None:
        assert ended == "failed"
    else:
        assert (done, ended) == (outcome.step, "stopped" if outcome.stopped else "finished")
    if outcome is None:
        assert case.bad is not None
        assert case.bad not in [s for (s,) in case.of("read")]
        assert all(step <= case.bad for step, *_ in case.of("save"))
        return
    steps, end = case.train.steps, case.until or case.train.steps
    assert outcome.step == outcome.state.step <= max(end, case.last.step if case.last else 0)
    assert outcome.step >= end or case.stop is not None
    if case.stop is not None and not case.save:
        assert all(event[0] != "steps" for event in case.events[case.stop :])
    evaluated = (steps,) in case.of("evaluated") or (case.last and case.last.step == steps and case.last.ranking)
    assert outcome.stopped == (outcome.step < steps or not evaluated)


def test_a_stopped_and_resumed_run_has_the_events_of_an_uninterrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(0)
    for _ in range(100):
        settings = random_case(dice).train
        straight = Case(settings)
        simulate(straight, monkeypatch)
        events, last, outcome = list[tuple[Any, ...]](), None, None
        while outcome is None or outcome.stopped:
            case = Case(settings, last, stop=dice.randint(0, 40))
            outcome = simulate(case, monkeypatch)
            events += case.events
            step, loss, _ = case.of("save")[-1] if case.of("save") else (last.step, last.ranking, None)  # type: ignore[union-attr]
            loss = 1.0 if (step,) in case.of("note") else loss
            about = {"config": asdict(CONFIG)}
            last = Info(step, loss, step * settings.batch_size * CONFIG.model.block_size, about=about)
        for kind in ("read", "line", "evaluated"):
            assert [e for e in events if e[0] == kind] == [e for e in straight.events if e[0] == kind]


def test_all_calls_reuse_the_blocks_of_their_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(replace(CONFIG.train, steps=5))
    simulate(case, monkeypatch)
    calls = dict(case.memory)
    taken = [i for i, (kind, *_) in enumerate(case.events) if kind == "steps"]
    assert calls["enter room"] <= min(taken) < max(taken) < calls["exit room"]


def test_free_memory_is_returned_after_each_evaluation_and_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(replace(CONFIG.train, steps=6, eval_every=3))
    simulate(case, monkeypatch)
    before_trim = [case.events[at - 1] for call, at in case.memory if call == "trim"]
    assert before_trim == [("save", 3, 1.0, False), ("save", 6, 1.0, False)]


def test_patience_ends_a_run_and_its_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation loss stays the same: the first evaluation is the best, and the run ends two evaluations later."""
    case = Case(replace(CONFIG.train, steps=25, eval_every=3, patience=2))
    outcome = simulate(case, monkeypatch)
    assert (outcome.step, outcome.stopped) == (9, False)
    about = {"config": asdict(replace(CONFIG, train=case.train)), "best": [1.0, 3]}
    last = Info(9, 1.0, 9 * CONFIG.train.batch_size * CONFIG.window, about=about)
    for patience, end in ((2, 9), (4, 15)):
        case = Case(replace(case.train, patience=patience), last)
        outcome = simulate(case, monkeypatch)
        assert (outcome.step, outcome.stopped) == (end, False)


def test_patience_counts_evaluations_if_a_resume_changes_their_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations have followed the best at step 3. The next two, one or seven steps apart, end the run."""
    was = replace(CONFIG.train, steps=25, eval_every=3)
    about = {"config": asdict(replace(CONFIG, train=was)), "best": [1.0, 3]}
    recorded = about | {"since_best": 2}
    for every, end in ((1, 11), (7, 21)):
        for facts in (about, recorded):
            last = Info(9, 1.0, 9 * CONFIG.train.batch_size * CONFIG.window, about=facts)
            case = Case(replace(was, eval_every=every, patience=4), last)
            outcome = simulate(case, monkeypatch)
            assert (outcome.step, outcome.stopped) == (end, False)


def test_calls_end_at_evaluations_and_checkpoints() -> None:
    settings = replace(CONFIG.train, steps=20, eval_every=10, checkpoint_every=4, steps_per_call=8)
    assert [(c.start, c.stop) for c in plan_calls(None, 20, settings)] == [
        (0, 1), (1, 4), (4, 8), (8, 10), (10, 12), (12, 16), (16, 20),
    ]  # fmt: skip
    assert next(plan_calls(Info(10), 20, settings)) == range(10, 10), "stopped during the evaluation"
    assert next(plan_calls(Info(10, 1.0), 20, settings)) == range(10, 11)
    assert list(plan_calls(Info(0), 1, settings)) == [range(0, 1)]
