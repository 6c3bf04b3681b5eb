"""Followers send each row once, even after kills, and how a run ended."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from event_files import read_events
from helpers import jaxgpt, small_run

from jaxgpt.checkpoint.info import Info
from jaxgpt.config_json import to_json
from jaxgpt.errors import TrainingFailed, UserError
from jaxgpt.follow import following
from jaxgpt.follow.following import follow
from jaxgpt.follow.position import Position
from jaxgpt.follow.sent_settings import settings_to_send
from jaxgpt.follow.tail import Tail
from jaxgpt.follow.tracker import Row
from jaxgpt.follow.trackers import TensorBoard
from jaxgpt.locks import has_writer, sole_writer
from jaxgpt.trainer.metrics import MetricsFile

RUN = Path("run")
STEPS = 30
EVERY = 5  # steps between evaluations
STARTED = "2026-11-27T12:00:00+00:00"
NOON = 1795780800.0  # the same time, in seconds since 1970


class Recording:
    """A tracker that keeps the rows, and raises an exception at some calls."""

    name = "recording"

    def __init__(self, at_once: int = 3) -> None:
        self.at_once = at_once
        self.rows: list[Row] = []
        self.pages: list[Any] = []
        self.statuses: list[str] = []

    def open(self, page: Any, mark: str) -> int | None:
        self.pages.append(page)
        return None

    def send(self, rows: Sequence[Row]) -> str:
        self.rows += rows
        return str(len(self.rows))

    def close(self, status: str) -> str:
        self.statuses.append(status)
        return "here"

    @property
    def orders(self) -> list[int]:
        return [row.order for row in self.rows]


def new_run(steps: int = STEPS) -> None:
    (RUN / "checkpoints").mkdir(parents=True)
    (RUN / "tokenizer.json").write_text("{}")
    (RUN / "config.json").write_text(to_json(small_run(steps=steps, eval_every=min(EVERY, steps))))


def write_steps(file: MetricsFile, steps: range, first: int = 0) -> Iterator[None]:
    """Write the lines of steps as a run does; pause after each line."""
    file.write(step=steps.start, started=STARTED, command="jaxgpt train --secret", host="host", changed={})
    for step in steps:
        file.write(step=step, loss=1 / (step + 1), lr=float("nan"), elapsed_seconds=float(step + 1 - first))
        yield
        if (step + 1) % EVERY == 0:
            file.write(step=step + 1, val_loss=2 / (step + 1), val_data="data")
            yield


def complete() -> None:
    """Write a run that has finished."""
    with MetricsFile(RUN / "metrics.jsonl") as file:
        for _ in write_steps(file, range(STEPS)):
            pass
        file.end(STEPS, "finished")


def expected(steps: int = STEPS) -> list[int]:
    """Return the orders of all rows of a run."""
    evaluations = [2 * step for step in range(EVERY, steps + 1, EVERY)]
    return sorted([2 * step + 1 for step in range(steps)] + evaluations)


def lives(dice: random.Random) -> Iterator[None]:
    """A run that is stopped, killed or fails at random steps, and resumed from its last evaluation, until it finishes."""
    done = 0
    last = None
    while done < STEPS:
        end = STEPS if dice.random() < 0.3 else dice.randint(done + 1, STEPS)
        with MetricsFile(RUN / "metrics.jsonl", last) as file:
            yield from write_steps(file, range(done, end))
            ended = dice.choice(["stopped", "killed", "failed"])
            if end == STEPS:
                file.end(end, "finished")
            elif ended != "killed":
                file.end(end, ended)  # type: ignore[arg-type]
            yield
        done = end if end == STEPS or ended == "stopped" else end // EVERY * EVERY
        last = Info(done, 1.0 if done % EVERY == 0 else None)


class Killed(BaseException):
    pass


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[None]], None]:
    """Return a function that sets the script of a run: a part runs before each look of the follower at the file."""

    def start(events: Iterator[None], parts: Callable[[], int] = lambda: 1) -> None:
        def is_running(path: Path) -> bool:
            return all(next(events, "ended") is None for _ in range(parts()))

        monkeypatch.setattr(following, "has_writer", is_running)

    return start


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_sent_once_across_resumes(seed: int, script: Any) -> None:
    dice = random.Random(seed)
    new_run()
    script(lives(dice), lambda: dice.choice([1, 1, 4, 15]))
    tracker = Recording(dice.choice([1, 3, 100]))
    followed = follow(RUN, tracker, poll=0)
    assert tracker.orders == expected()
    assert (followed.rows, followed.status, followed.place) == (len(expected()), "finished", "here")
    assert (len(tracker.pages), tracker.statuses) == (1, ["finished"])


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_in_the_event_file_once_if_followers_are_killed(
    seed: int, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower is killed before a row is written, between the row and the position, or after both."""
    dice = random.Random(seed)
    send = TensorBoard.send
    write = Position.write

    def killed_send(self: TensorBoard, rows: Sequence[Row]) -> str:
        if dice.random() < 0.2:
            raise Killed
        return send(self, rows)

    def killed_write(self: Position, directory: Path) -> None:
        if self.order >= 0 and dice.random() < 0.2:
            raise Killed
        write(self, directory)
        if self.order >= 0 and dice.random() < 0.2:
            raise Killed

    monkeypatch.setattr(TensorBoard, "send", killed_send)
    monkeypatch.setattr(TensorBoard, "at_once", dice.choice([1, 4]))
    monkeypatch.setattr(Position, "write", killed_write)
    new_run()
    script(lives(dice), lambda: dice.choice([1, 1, 4]))
    kills = 0
    while True:
        try:
            status = follow(RUN, TensorBoard(), poll=0).status
        except Killed:
            kills += 1
            continue
        break
    [file] = Path("run/trackers/tensorboard").glob("events.*")
    events = read_events(file)
    assert [2 * step + ("loss" in values) for step, _, values in events] == expected()
    assert (status, kills > 0) == ("finished", True)


def test_a_row_has_the_finite_numbers_of_its_line_and_its_time() -> None:
    new_run()
    complete()
    tracker = Recording()
    follow(RUN, tracker)
    first, second, *_ = tracker.rows
    assert first == Row(0, {"loss": 1.0, "elapsed_seconds": 1.0}, NOON + 1, 1)
    assert second.time == NOON + 2
    assert tracker.rows[5] == Row(5, {"val_loss": 0.4}, NOON + 5, 10)


def test_a_second_follower_has_nothing_to_send() -> None:
    new_run()
    complete()
    assert follow(RUN, Recording()).rows == len(expected())
    again = Recording()
    assert follow(RUN, again) == (0, "finished", "")
    assert again.pages == []


def test_a_finished_run_that_trains_longer_continues_its_page() -> None:
    new_run()
    complete()
    first = Recording()
    second = Recording()
    follow(RUN, first)
    with MetricsFile(RUN / "metrics.jsonl", Info(STEPS, 1.0)) as file:
        for _ in write_steps(file, range(STEPS, STEPS + 5)):
            pass
        file.end(STEPS + 5, "stopped")
    assert follow(RUN, second).status == "stopped"
    assert first.orders + second.orders == expected(STEPS + 5)
    assert first.pages[0].id == second.pages[0].id


def test_an_incomplete_line_is_sent_when_it_is_complete() -> None:
    path = Path("metrics.jsonl")
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    tail = Tail(path)
    assert [row.step for row in tail.rows()] == [0]
    with path.open("a") as file:
        file.write('ss": 1.0}\n{"step": 2, "loss": 1.0}\n')
    assert [row.step for row in tail.rows()] == [1, 2]


def test_a_file_that_is_written_again_in_place_is_read_from_its_start() -> None:
    path = Path("metrics.jsonl")
    path.write_text('{"step": 0, "loss": 1.0}\n')
    tail = Tail(path)
    assert len(list(tail.rows())) == 1
    path.write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 2.0}\n')
    assert [row.values for row in tail.rows()] == [{"loss": 2.0}, {"loss": 2.0}]


@pytest.mark.parametrize("ended", ["finished", "stopped", "failed", "killed"])
def test_the_page_is_closed_as_the_run_ended(ended: Any) -> None:
    new_run()
    with MetricsFile(RUN / "metrics.jsonl") as file:
        for _ in write_steps(file, range(3)):
            pass
        if ended != "killed":
            file.end(3, ended)
    tracker = Recording()
    assert follow(RUN, tracker).status == ended
    assert tracker.statuses == [ended]


def test_a_finished_run_of_an_earlier_version_has_no_end_line() -> None:
    new_run()
    complete()
    path = RUN / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert follow(RUN, Recording()).status == "finished"


def test_a_run_that_is_replaced_gets_no_rows_of_the_old_page(script: Any) -> None:
    def replaced() -> Iterator[None]:
        with MetricsFile(RUN / "metrics.jsonl") as file:
            yield from write_steps(file, range(3))
        RUN.rename("old")
        new_run()
        complete()
        yield

    new_run()
    script(replaced())
    tracker = Recording()
    assert follow(RUN, tracker, poll=0).status == "replaced"
    assert (tracker.orders, tracker.statuses) == ([1, 3, 5], ["killed"])
    assert follow(RUN, Recording(), poll=0).rows == len(expected())


def test_a_tracker_that_raises_ends_the_follower_with_one_line_and_the_next_one_continues() -> None:
    new_run()
    complete()

    class Failing(Recording):
        def send(self, rows: Sequence[Row]) -> str:
            if len(self.rows) >= 9:
                raise ConnectionError("no\nnetwork")
            return super().send(rows)

    failing = Failing()
    second = Recording()
    with pytest.raises(TrainingFailed) as error:
        follow(RUN, failing)
    again = "send the remaining rows with: jaxgpt follow run --to recording"
    assert str(error.value) == f"the tracker recording failed: ConnectionError: no network; {again}"
    follow(RUN, second)
    assert failing.orders + second.orders == expected()


def test_a_tracker_that_has_lost_rows_gets_them_again() -> None:
    new_run()
    complete()
    follow(RUN, Recording())

    class Lossy(Recording):
        def open(self, page: Any, mark: str) -> int | None:
            super().open(page, mark)
            return 20

    with MetricsFile(RUN / "metrics.jsonl", Info(STEPS, 1.0)) as file:
        file.write(step=STEPS, loss=1.0)
    lossy = Lossy()
    follow(RUN, lossy)
    assert lossy.orders == [order for order in [*expected(), 2 * STEPS + 1] if order > 20]


def test_settings_are_sent_without_directories() -> None:
    sent = settings_to_send(
        {
            "data.path": "/home/me/secret/my.txt",
            "data.mix": ("/home/me/web=0.7", "code=0.3"),
            "init_from": "runs/gpt2/",
            "train.prompt": "a/b",
            "train.steps": 3,
        }
    )
    assert sent == {
        "data.path": "my.txt",
        "data.mix": ["web=0.7", "code=0.3"],
        "init_from": "gpt2",
        "train.prompt": "a/b",
        "train.steps": 3,
    }


@pytest.mark.parametrize(
    ("name", "value", "sent"),
    [
        ("data.answer_tokens", ("<|a|>", "</s>"), ["<|a|>", "</s>"]),
        ("data.chat_template_kwargs", '{"x": "a/b"}', '{"x": "a/b"}'),
        ("data.mix", ("/home/me/web/=0.7", "@1000000", "code=1"), ["web=0.7", "@1000000", "code=1"]),
        ("init_from", "/home/me/base/checkpoints/500", "base/500"),
        ("state_from", "/home/me/base", "base"),
        ("post.reference", "", ""),
        ("post.reward", (r"regex:\d+/\d+",), [r"regex:\d+/\d+"]),
        ("post.reward", ("/home/me/own.py:score=0.5", "json=0.2"), ["own.py:score=0.5", "json=0.2"]),
        ("new.setting", "/home/me/file", "file"),
    ],
)
def test_only_paths_are_shortened(name: str, value: Any, sent: Any) -> None:
    assert settings_to_send({name: value}) == {name: sent}


def test_only_metrics_and_settings_are_sent() -> None:
    new_run()
    complete()
    tracker = Recording()
    follow(RUN, tracker)
    [page] = tracker.pages
    assert set(page.settings) >= {"preset", "train.steps", "model.n_layer"}
    assert "directory" not in page.settings
    text = str([tracker.rows, page.run, page.id, page.settings])
    assert not [word for word in ("secret", "host", str(Path.cwd())) if word in text]


def test_a_damaged_position_is_one_line() -> None:
    new_run()
    complete()
    follow(RUN, Recording())
    (RUN / "trackers/recording/position.json").write_text('{"id": 3}')
    with pytest.raises(
        UserError, match=r"position.json is damaged: delete run/trackers/recording to send the run again"
    ):
        follow(RUN, Recording())


def test_a_writer_is_found_without_testing_its_lock() -> None:
    """A process that started during a test of the lock would find it locked."""
    Path("a").mkdir()
    assert has_writer(Path("a")) is False
    code = "import sys; from pathlib import Path; from jaxgpt.locks import sole_writer\n"
    code += "with sole_writer(Path('a')): print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    assert has_writer(Path("a")) is True
    process.kill()
    process.wait()
    assert Path("a/.lock").read_text() != "", "the killed process could not empty the file"
    assert has_writer(Path("a")) is False
    with sole_writer(Path("a")):
        text = Path("a/.lock").read_text()
    Path("a/.lock").write_text(text.replace(" on ", " on not-"))
    assert has_writer(Path("a")) is None


def test_a_run_without_metrics_is_one_line() -> None:
    new_run()
    result = jaxgpt("follow", "run", "--to", "tensorboard")
    assert (result.code, result.out) == (2, "")
    assert (
        result.err == "jaxgpt: run has no metrics.jsonl: it was imported or saved from Python; choose a trained run\n"
    )
    assert not Path("run/trackers").exists()


def test_the_command_prints_the_rows_and_the_place() -> None:
    new_run()
    complete()
    result = jaxgpt("follow", "run", "--to", "tensorboard")
    assert (result.code, result.err) == (0, "")
    assert result.out == (
        "sent 36 lines to tensorboard; the run is finished\nsee: tensorboard --logdir run/trackers/tensorboard\n"
    )


@pytest.mark.ci
def test_real_processes_are_killed() -> None:
    """A follower is killed with SIGKILL, a second one waits for the third, and the run itself is killed at last."""
    new_run()
    code = "import sys, time; from pathlib import Path; from jaxgpt.locks import sole_writer\n"
    code += "from jaxgpt.trainer.metrics import MetricsFile\n"
    code += "with sole_writer(Path('run')), MetricsFile(Path('run/metrics.jsonl')) as file:\n"
    code += (
        "    for step in range(10**6): file.write(step=step, loss=1.0, elapsed_seconds=step * 1.0); time.sleep(0.01)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code])
    command = [sys.executable, "-m", "jaxgpt", "follow", "run", "--to", "tensorboard"]
    position = Path("run/trackers/tensorboard/position.json")

    def sent() -> int:
        return json.loads(position.read_text())["order"] if position.exists() else -1

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    wait_until((RUN / "metrics.jsonl").exists)
    first = subprocess.Popen(command)
    wait_until(lambda: sent() > 0)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = sent()
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    wait_until(lambda: sent() > before)
    writer.kill()
    writer.wait()
    results = [other.communicate(timeout=120)[0] for other in others]
    [file] = Path("run/trackers/tensorboard").glob("events.*")
    steps = [step for step, _, _ in read_events(file)]
    assert steps == list(range(len((RUN / "metrics.jsonl").read_text().splitlines())))
    assert all("the run is killed" in result for result in results)
    assert sum("sent 0 lines" in result for result in results) == 1
