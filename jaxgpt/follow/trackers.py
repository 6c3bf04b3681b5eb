"""The trackers of `jaxgpt follow` and `--track`. Each class imports its package when it opens a page."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from jaxgpt.errors import UserError
from jaxgpt.follow.events import EventFile
from jaxgpt.follow.tracker import Page, Row, Tracker
from jaxgpt.suggestions import did_you_mean

PROJECT = "jaxgpt"  # default name of the project or experiment


class ShippedTracker(Tracker, Protocol):
    """A tracker that commands find by name.

    Attributes:
        package: name of its package on PyPI and in Python; "": no package.
    """

    package: str


class TensorBoard:
    """An event file in RUN/trackers/tensorboard. Writing it needs no package; `pip install tensorboard` to view it."""

    name = "tensorboard"
    package = ""
    at_once = 1000

    page: Page
    file: EventFile | None  # created with the first row: its name contains the time of the row

    def open(self, page: Page, mark: str) -> int | None:
        self.page = page
        self.file = None
        if not mark:
            return None
        # Records after this size were written by a follower that was killed before it recorded their position.
        name, _, size = mark.partition(":")
        path = page.directory / name
        if not path.is_file() or path.stat().st_size < int(size):
            raise UserError(f"{path} was deleted or changed: delete {page.directory} to send the run again")
        self.file = EventFile(path, int(size))
        return None

    def send(self, rows: Sequence[Row]) -> str:
        if self.file is None:
            first = rows[0].time
            name = f"events.out.tfevents.{int(first):010d}.{self.page.id}"
            self.file = EventFile(self.page.directory / name, wall_time=first)
        for row in rows:
            self.file.add(row.step, row.values, row.time)
        return f"{self.file.path.name}:{self.file.flush()}"

    def close(self, status: str) -> str:
        if self.file is not None:
            self.file.close()
        return f"tensorboard --logdir {self.page.directory}"


class Wandb:
    """Weights & Biases. The project is WANDB_PROJECT; with WANDB_MODE=offline, `wandb sync` sends the files later.

    wandb rejects rows with lower steps than the stored steps, so its step is `Row.order`; charts show `step`.
    Offline, rows count as sent when they are in the file.
    """

    name = "wandb"
    package = "wandb"
    at_once = 100
    flush = 0.2  # seconds between flushes of the offline file
    flushes = 3  # flushes to wait for after a call of `send`, so that its rows are in the file

    page: Page
    run: Any  # wandb.Run

    def open(self, page: Page, mark: str) -> int | None:
        import wandb

        # Only metrics and settings are sent: no git state, code, command, environment, host or console output.
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=self.flush,
        )
        self.page = page
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=page.run,
            id=page.id,
            resume="allow",
            dir=page.directory,
            config=page.settings,
            settings=settings,
        )
        self.run.define_metric("*", step_metric="step")
        if self.run.offline or not mark:
            return None
        return int(self.run.starting_step) - 1  # `Row.order` of the last row on the server

    def send(self, rows: Sequence[Row]) -> str:
        for row in rows:
            self.run.log({"step": row.step, **row.values}, step=row.order, commit=True)
        if self.run.offline:
            time.sleep(self.flushes * self.flush)
        return str(rows[-1].order)

    def close(self, status: str) -> str:
        self.run.summary["ended"] = status
        place = f"wandb sync {self.page.directory}/wandb/offline-run-*"
        if not self.run.offline:
            place = str(self.run.url)
        self.run.finish(exit_code=0 if status in ("finished", "stopped") else 1)
        return place


class Mlflow:
    """MLflow at MLFLOW_TRACKING_URI, or at MLflow's default. The experiment is MLFLOW_EXPERIMENT_NAME.

    MLflow stores a metric of equal key, step, time and value once, so rows that are sent again are not stored twice.
    """

    name = "mlflow"
    package = "mlflow"
    at_once = 50

    # Limits of MLflow's interface.
    param_characters = 500
    params_per_call = 100
    metrics_per_call = 1000

    client: Any  # mlflow.MlflowClient
    id: str  # id of the run in MLflow

    def open(self, page: Page, mark: str) -> int | None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)

        # A tag finds the run that an earlier follower has created.
        same = self.client.search_runs([experiment], f"tags.`jaxgpt.id` = '{page.id}'")
        if same:
            self.id = same[0].info.run_id
            self.client.update_run(self.id, "RUNNING")
            return None
        created = self.client.create_run(experiment, tags={"jaxgpt.id": page.id}, run_name=page.run)
        self.id = created.info.run_id
        params = [Param(name, str(value)[: self.param_characters]) for name, value in page.settings.items()]
        for batch in _batches(params, self.params_per_call):
            self.client.log_batch(self.id, params=batch)
        return None

    def send(self, rows: Sequence[Row]) -> str:
        from mlflow.entities import Metric

        metrics = []
        for row in rows:
            milliseconds = int(row.time * 1000)
            for name, value in row.values.items():
                accepted = re.sub(r"[^\w. :/-]", "_", name)  # MLflow rejects other characters, as in reward_regex:^a$
                metrics.append(Metric(accepted, value, milliseconds, row.step))
        for batch in _batches(metrics, self.metrics_per_call):
            self.client.log_batch(self.id, metrics=batch)
        return ""

    def close(self, status: str) -> str:
        ends = {"finished": "FINISHED", "stopped": "KILLED", "killed": "KILLED"}
        self.client.set_terminated(self.id, ends.get(status, "FAILED"))
        return f"mlflow server --backend-store-uri {self.client.tracking_uri}"


class Trackio:
    """Trackio: a database in TRACKIO_DIR, or a Hugging Face Space (TRACKIO_SPACE_ID). The project is TRACKIO_PROJECT."""

    name = "trackio"
    package = "trackio"
    at_once = 100

    project: str
    run: Any  # trackio.Run

    def open(self, page: Page, mark: str) -> int | None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self.project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self.run = trackio.init(
            project=self.project,
            name=page.id,
            config=page.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Trackio writes in a thread: a killed follower may have lost its last rows, or stored rows without recording
        # its position.
        is_remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        stored = SQLiteStorage.get_max_step_for_run(self.project, self.run.name, run_id=self.run.id)
        if is_remote or str(stored) == mark:
            return None
        if stored is None:
            return -1
        return 2 * stored + 1  # the highest `Row.order` of this step

    def send(self, rows: Sequence[Row]) -> str:
        for row in rows:
            self.run.log(row.values, step=row.step)
        return str(rows[-1].step)

    def close(self, status: str) -> str:
        self.run.finish()
        return f"trackio show --project {self.project}"


def _batches(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Divide values into batches of at most `size`."""
    return [values[first : first + size] for first in range(0, len(values), size)]


TRACKERS: Mapping[str, type[ShippedTracker]] = {
    TensorBoard.name: TensorBoard,
    Wandb.name: Wandb,
    Mlflow.name: Mlflow,
    Trackio.name: Trackio,
}


def tracker_of(name: str) -> Tracker:
    """Return a tracker by name.

    Raises:
        UserError: if the name is unknown, or the package of the tracker is not installed.
    """
    if name not in TRACKERS:
        raise UserError(f"unknown tracker {name!r}{did_you_mean(name, TRACKERS)}: choose from {', '.join(TRACKERS)}")
    tracker = TRACKERS[name]
    if tracker.package and find_spec(tracker.package) is None:
        raise UserError(f"the tracker {name} needs the package {tracker.package}: pip install {tracker.package}")
    return tracker()
