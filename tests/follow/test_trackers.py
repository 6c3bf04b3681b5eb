"""Trackers by name, and each package read back with its own reader or from its file."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import jaxgpt, small_run

from jaxgpt.checkpoint.info import Info
from jaxgpt.config_json import to_json
from jaxgpt.errors import UserError
from jaxgpt.follow import trackers
from jaxgpt.follow.following import follow
from jaxgpt.follow.trackers import TRACKERS, tracker_of
from jaxgpt.trainer.metrics import MetricsFile

RUN = Path("run")
SECRET = "secret-directory"
STARTED = "2026-11-27T12:00:00+00:00"


def write(steps: range, last: Info | None = None, ended: Any = "finished") -> None:
    """Write the lines of a run; the last one has a validation loss."""
    (RUN / "checkpoints").mkdir(parents=True, exist_ok=True)
    (RUN / "tokenizer.json").write_text("{}")
    (RUN / "config.json").write_text(to_json(small_run()).replace("text.txt", f"/{SECRET}/text.txt"))
    with MetricsFile(RUN / "metrics.jsonl", last) as file:
        file.write(step=steps.start, started=STARTED, command=f"jaxgpt train {SECRET}", directory=SECRET, changed={})
        for step in steps:
            file.write(step=step, loss=1 / (step + 1), elapsed_seconds=float(step))
        file.write(step=steps.stop, val_loss=2.0, val_data="data")
        file.end(steps.stop, ended)


def test_every_name_is_found_or_its_package_is_named() -> None:
    for name, tracker in TRACKERS.items():
        try:
            assert tracker_of(name).name == name
        except UserError as e:
            assert str(e) == f"the tracker {name} needs the package {tracker.package}: pip install {tracker.package}"


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    write(range(3))
    for command in (["follow", "run", "--to", "wandb"], ["train", "--out", "new", "--track", "wandb"]):
        result = jaxgpt(*command)
        assert (result.code, result.out) == (2, "")
        assert result.err == "jaxgpt: the tracker wandb needs the package wandb: pip install wandb\n"
    assert not Path("new").exists()
    assert not Path("run/trackers").exists()


def test_a_package_is_imported_only_to_open_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that fails in its import fails in one line."""
    Path("broken").mkdir()
    Path("broken/wandb.py").write_text("raise OSError('no library')")
    monkeypatch.syspath_prepend(str(Path("broken").resolve()))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    write(range(3))
    result = jaxgpt("follow", "run", "--to", "wandb")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "jaxgpt: the tracker wandb failed: OSError: no library; send the remaining rows with: jaxgpt follow run --to wandb\n"
    )


def test_a_tracker_follows_several_runs() -> None:
    tracker = tracker_of("tensorboard")
    for name in ("first", "second"):
        write(range(3))
        RUN.rename(name)
        assert follow(Path(name), tracker)[:2] == (4, "finished")
        assert len(list(Path(name, "trackers/tensorboard").glob("events.out.tfevents.*"))) == 1


# What each package stores is read back after a run that stops, and a second follower after the run is resumed.
LOSSES = [(step, 1 / (step + 1)) for step in range(20)]
VALIDATION = [(10, 2.0), (20, 2.0)]


def follow_twice(name: str) -> None:
    write(range(10), ended="stopped")
    assert follow(RUN, tracker_of(name)).status == "stopped"
    write(range(10, 20), Info(10, 1.0))
    assert follow(RUN, tracker_of(name))[:2] == (11, "finished")


def check_private(*files: Path) -> None:
    for file in files:
        assert SECRET.encode() not in file.read_bytes(), file


@pytest.mark.long
def test_wandb_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    follow_twice("wandb")
    files = sorted(Path("run/trackers/wandb/wandb").glob("offline-run-*/*.wandb"))
    rows = [row for file in files for row in wandb_rows(file)]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == LOSSES
    assert [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row] == VALIDATION
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    check_private(*files)


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read an offline file of wandb: the records of a LevelDB log, each a protobuf `Record`."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at = 7
    content = b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        content += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the last or only part of a record
            record = Record()
            record.ParseFromString(content)
            content = b""
            if record.WhichOneof("record_type") == "history":
                yield {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }


@pytest.mark.long
def test_mlflow_in_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    follow_twice("mlflow")
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("jaxgpt").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((each.step, each.value) for each in history) == LOSSES
    validation = client.get_metric_history(run.info.run_id, "val_loss")
    assert sorted((each.step, each.value) for each in validation) == VALIDATION
    assert (run.info.status, run.info.run_name, run.data.params["train.steps"]) == ("FINISHED", "run", "8")
    check_private(Path("mlflow.db"))

    # Rows that are sent again are stored once.
    Path("run/trackers/mlflow/position.json").write_text(
        json.dumps({"id": run.data.tags["jaxgpt.id"], "order": 9, "mark": "", "ended": ""})
    )
    assert follow(RUN, tracker_of("mlflow")).rows == 17
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 20


@pytest.mark.long
def test_trackio_in_a_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at the import
    pytest.importorskip("trackio")
    follow_twice("trackio")
    with sqlite3.connect(tmp_path / "trackio/jaxgpt.db") as database:
        found = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    rows = [(step, json.loads(metrics)) for step, metrics in found]
    assert [(step, row["loss"]) for step, row in rows if "loss" in row] == LOSSES
    assert [(step, row["val_loss"]) for step, row in rows if "val_loss" in row] == VALIDATION
    check_private(tmp_path / "trackio/jaxgpt.db")
