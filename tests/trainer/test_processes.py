"""Several processes on this machine: same results as one, agreement on settings, and failure of a peer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from helpers import TEXT, comparable, flags, jaxgpt, small_run
from jax.errors import JaxRuntimeError

from jaxgpt.checkpoint import store as checkpoint
from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.intact import find_damage
from jaxgpt.cli.failure import is_reported
from jaxgpt.config import DistributedConfig, MeshConfig
from jaxgpt.errors import TrainingFailed, UserError
from jaxgpt.parallel import join, processes
from jaxgpt.parallel.join import _scheduled
from jaxgpt.parallel.mesh import resolve
from jaxgpt.signals import STOPPING

TINY = flags(
    data__path="text.txt",
    train__prompt="1",
    model__n_layer=1,
    model__norm="none",
    model__mlp="none",
    model__n_embd=16,
    model__n_head=4,
    model__block_size=16,
    optim__warmup_steps=2,
    # Small steps: the order of sums depends on the number of processes, and large steps amplify that beyond 1e-5.
    optim__learning_rate=4e-4,
    train__batch_size=8,
    train__eval_every=4,
    train__log_every=1,
    train__sample_tokens=5,
)
FIGURES = ("loss", "val_loss", "grad_norm", "val_stderr", "lr")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a text, and a shared compilation cache."""
    Path("text.txt").write_text(TEXT)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process that is killed afterwards."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *args], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def launched(processes: int, *args: str) -> Any:
    own = flags(processes=processes, devices_per_process=1)
    return started("-m", "jaxgpt", "launch", *own, "train", *args)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def pair(*commands: Sequence[str]) -> list[tuple[int, str, str]]:
    """Run commands at the same time; return exit codes, outputs and errors."""
    pipe = subprocess.PIPE
    processes = [subprocess.Popen([sys.executable, *c], stdout=pipe, stderr=pipe, text=True) for c in commands]
    results = [process.communicate(timeout=120) for process in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, results, strict=True)]


def ranks(args: Callable[[int], Sequence[str]], processes: int = 2) -> list[Sequence[str]]:
    """Return `jaxgpt train` commands with their process index and count."""
    port = free_port()
    settings = ["--distributed.coordinator", f"127.0.0.1:{port}", "--distributed.num-processes", str(processes)]
    return [
        ["-m", "jaxgpt", "train", *args(n), *settings, "--distributed.process-id", str(n)] for n in range(processes)
    ]


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def printed(out: str) -> str:
    """Return the output without the lines of gloo, which connects processes on CPUs."""
    return "".join(line for line in out.splitlines(keepends=True) if not line.startswith("[Gloo]"))


def reached(run: str, step: int) -> bool:
    return any(line["step"] >= step for line in comparable(run)) and bool(checkpoints(Path(run, "checkpoints")))


def assert_same_figures(run: str, other: str, rtol: float = 1e-5) -> None:
    a, b = comparable(run), comparable(other)
    assert [line["step"] for line in a] == [line["step"] for line in b]
    for name in FIGURES:
        here, there = ([line[name] for line in lines if name in line] for lines in (a, b))
        assert len(here) == len(there)
        np.testing.assert_allclose(here, there, rtol=rtol, err_msg=name)


@pytest.mark.ci
def test_two_processes_exchange_values() -> None:
    port = str(free_port())
    script = str(Path(__file__).with_name("pair.py"))
    results = pair([script, port, "0"], [script, port, "1"])
    assert [code for code, _, _ in results] == [0, 0], results
    a, b = (json.loads(out.splitlines()[-1]) for _, out, _ in results)  # after the lines of gloo
    assert (a.pop("leader"), b.pop("leader")) == (True, False)
    assert (a.pop("agreed"), b.pop("agreed")) == (0, 1)
    # Each process reads only the rows of its devices, each row once; all processes read all rows if no mesh axis splits rows.
    assert (a.pop("rows, data"), b.pop("rows, data")) == ([[0, 2], [2, 4]], [[4, 6], [6, 8]])
    assert (a.pop("rows, tensor"), b.pop("rows, tensor")) == ([[0, 4]], [[4, 8]])
    assert a == b
    assert a["decided"] == ["by", 0]
    assert a["refused"] == "process 0 cannot"
    assert a["disagreed"].startswith("the processes disagree: seed is 10 in process 0, 11 in process 1;")
    assert a["disagreed late"].startswith("the processes disagree: mix is ("), "values are compared whole"
    assert a["failed in one"] == "process 1: process 1 cannot"
    assert a["whole, data"]
    assert a["whole, tensor"]
    assert a["answers on CPUs"] == [0, 0, 1, 0, 2, 0]
    assert a["answers"] == [0, 0, 0, 0, 1, 0, 2, 0]


@pytest.mark.long
def test_a_killed_process_and_a_resume_by_one_equal_an_uninterrupted_run(place: None) -> None:
    """One of two processes is killed and the other exits with a message; one process resumes, with the same results."""
    length = flags(train__steps=60)
    with launched(2, "shakespeare", *TINY, *length, "--out", "killed") as launcher:
        wait_until(lambda: reached("killed", 8), launcher)
        os.kill(children(launcher)[1], signal.SIGKILL)
        at = time.monotonic()
        out, err = launcher.communicate(timeout=120)
        print(f"noticed after {time.monotonic() - at:.1f} s at most")
    assert launcher.returncode == 1
    assert "devices  2 x cpu (cpu): data 2, in 2 processes" in out
    assert "process 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    for step, info in checkpoints(Path("killed/checkpoints")).items():
        folder = Path("killed/checkpoints", str(step))
        assert find_damage(folder) == ""
        files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        assert info.sha256.keys() == files, "the files of every process have digests"
    assert any("process_1" in name for name in files), "the second process has written its shards"
    assert jaxgpt("train", "--resume", "--out", "killed", "--mesh.data", "1").code == 0
    assert jaxgpt("train", "shakespeare", *TINY, *length, "--out", "straight", "--mesh.data", "1").code == 0
    assert_same_figures("killed", "straight")


# A process that sleeps between its last message and its exit, so that process 0 exits first.
DAWDLE = """
import time
from jaxgpt.cli import entry
from jaxgpt.parallel import join
exit_process = join.exit_process
join.exit_process = lambda code: (time.sleep(1.0), exit_process(code))
entry()
"""


@pytest.mark.ci
def test_processes_with_different_settings_all_exit(place: None) -> None:
    prompt, late = ranks(lambda n: ["shakespeare", *TINY, "--train.seed", str(n), "--out", "run"])
    for code, out, err in pair(prompt, ["-c", DAWDLE, *late[2:]]):
        assert (code, printed(out)) == (2, "")
        assert err.startswith("jaxgpt: the processes disagree: train.seed is 0 in process 0, 1 in process 1;")
        assert err.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.ci
@pytest.mark.parametrize("process", ["0", "1"])
def test_a_missing_process_is_one_line(process: str) -> None:
    command = f"train --distributed.num-processes 2 --distributed.process-id {process} --distributed.join-seconds 2"
    address = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "jaxgpt", *command.split(), "--distributed.coordinator", address]
    result = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert result.stderr.startswith(f"jaxgpt: cannot join the other processes through {address} within 2 s: check")


def test_the_last_line_of_a_killed_launch_is_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """If XLA ends the other processes, none of them prints this line."""
    for process, code, said in (
        (0, -9, ""),
        (1, -6, "Check failure\n"),
        (1, 1, "jaxgpt: failed; resume with: jaxgpt x\n"),
    ):
        ends = iter([MagicMock(stderr=[said] * (n == process), returncode=code) for n in range(2)])
        monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=ends))
        result = jaxgpt("launch", "train", "--resume", "--out", "my run")
        assert result.code == 1
        line = "jaxgpt: resume with: jaxgpt launch --processes 2 train --resume --out 'my run'\n"
        assert result.err.endswith(line if code < 0 else said)


STACK = (
    "F1127 11:23:24.638925    1374 client.h:80] Terminating process because the JAX distributed service detected errors.\n"
    "Additional GRPC error information from remote target coordination_service\n"
    "    @     0x7f1e1c2c5b00  tsl::CoordinationServiceAgent::SetError()\n"
)


def test_the_reason_of_a_failure_is_not_buried_by_the_processes_that_xla_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 0 names the silent process; XLA aborts process 1, which may print its own line."""
    reason = "jaxgpt: process 1 sent no heartbeat for 30 s; resume with: jaxgpt x\n"
    own = "jaxgpt: process 1 was paused for 46 s\n"
    ends = iter([MagicMock(stderr=[reason], returncode=1), MagicMock(stderr=[STACK, own], returncode=-6)])
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=ends))
    result = jaxgpt("launch", "train", "--resume", "--out", "my run")
    assert (result.code, result.err) == (1, reason + own)


def test_the_reason_of_a_stop_is_not_buried_by_the_processes_that_xla_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 stops a stuck run on a signal, and exits with 75."""
    reason = "jaxgpt: stopped without saving: process 1 has not reached step 1; resume with: jaxgpt x\n"
    ends = iter([MagicMock(stderr=[reason], returncode=75), MagicMock(stderr=[STACK], returncode=-6)])
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=ends))
    result = jaxgpt("launch", "train", "--resume", "--out", "my run")
    assert (result.code, result.err) == (75, reason)


def test_a_launcher_outlives_a_second_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, it would exit before it has forwarded the signal, and the processes would go on for a while."""
    from jaxgpt.cli import launch

    monkeypatch.setattr(launch, "SIGNALS", ())
    monkeypatch.setattr(subprocess, "Popen", MagicMock(return_value=MagicMock(stderr=[])))
    with socket.socket() as sender:
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.fileno())
        try:
            launch._Fleet(2).start(["train"], 0)
            assert signal.set_wakeup_fd(-1) == -1, "no thread receives the signals"
        finally:
            signal.set_wakeup_fd(before)


def test_a_stack_trace_without_a_reason_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([MagicMock(stderr=[], returncode=1), MagicMock(stderr=[STACK], returncode=-6)])
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=ends))
    result = jaxgpt("launch", "train", "--resume", "--out", "my run")
    assert STACK in result.err
    assert "process 1 was killed by SIGABRT" in result.err


def test_a_real_time_signal_without_a_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    number = signal.SIGRTMIN + 3
    ends = iter([MagicMock(stderr=[], returncode=0), MagicMock(stderr=[], returncode=-number)])
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=ends))
    result = jaxgpt("launch", "train", "--resume", "--out", "run")
    assert (result.code, result.err.splitlines()[0]) == (1, f"jaxgpt: process 1 was killed by signal {number}")


def test_a_process_that_exits_before_the_first_checkpoint_has_nothing_to_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 1 is killed, and process 0 reports that nothing has been written."""
    reason = "jaxgpt: another process exited, so this process stops: nothing has been written yet\n"
    ends = iter([MagicMock(stderr=[reason], returncode=1), MagicMock(stderr=[], returncode=-9)])
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=ends))
    result = jaxgpt("launch", "train", "shakespeare", "--out", "run")
    assert (result.code, result.err) == (1, f"{reason}jaxgpt: process 1 was killed by SIGKILL\n")


def test_the_port_of_a_launch_is_held_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: list[str], devices: int) -> None:
        _, _, port = command[-1].partition(":")
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", int(port)))

    from jaxgpt.cli import launch

    exits = [launch.Exit(75, [])]
    monkeypatch.setattr(launch, "_Fleet", lambda count: MagicMock(start=start, wait=lambda: exits))
    assert jaxgpt("launch", "train").code == 75


def test_a_signal_while_processes_start_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxgpt.cli import launch

    started = list[MagicMock]()

    def start(*args: Any, **options: Any) -> MagicMock:
        started.append(MagicMock(stderr=[]))
        if len(started) == 1:
            signal.raise_signal(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(launch, "SIGNALS", (signal.SIGTERM,))
    fleet = launch._Fleet(2)
    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.getsignal(signal.SIGTERM)
    try:
        fleet.start(["train"], 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    for process in started:
        process.send_signal.assert_called_with(signal.SIGTERM)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_processes": 2}, "need distributed.coordinator"),
        (
            {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 2},
            "process_id 2 must be at least 0 and below distributed.num_processes 2",
        ),
        ({"coordinator": "127.0.0.1", "num_processes": 2, "process_id": 0}, "coordinator must be HOST:PORT"),
        ({"coordinator": "auto", "process_id": 1}, "need distributed.coordinator"),
    ],
)
def test_bad_places(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DistributedConfig(**settings)


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, False),  # sbatch without srun: one process
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"MEGASCALE_NUM_SLICES": "2"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, False),  # requested with auto
    ],
)
def test_schedulers_that_start_several_processes(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], several: bool
) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "TPU_", "MEGASCALE_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _scheduled() is several


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Read error: Connection reset by peer"), True),
        (TimeoutError("ChainedFuture completed 3/5 futures but timed out after 5.69 seconds."), True),
        (TrainingFailed("a checkpoint could not be written (INTERNAL: Barrier failed because: ...)"), True),
        (UserError("cannot download X (Connection refused)"), False),
        (OSError(28, "No space left on device"), False),
        (TrainingFailed("loss is nan at step 3"), False),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_recognizing_the_failure_of_a_peer(error: Exception, loss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not processes.is_peer_failure(error), "there is no peer"
    monkeypatch.setattr(processes, "_count", 2)
    assert processes.is_peer_failure(error) is loss


@pytest.mark.parametrize(
    ("error", "nans", "in_one_line"),
    [
        (FloatingPointError("invalid value (nan) encountered in sample"), True, True),
        (FloatingPointError("divide by zero"), False, False),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False, True),
        (MemoryError(), False, True),
        (OSError(28, "No space left on device"), False, True),
        (OSError(2, "No such file or directory", "text.txt"), False, True),
        (BrokenPipeError(32, "Broken pipe"), False, True),  # as in `jaxgpt train | head`
        (OSError("no number"), False, False),
        (UserError("bad data"), False, True),
        (KeyError("bug"), False, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_that_the_command_line_reports_are_no_tracebacks_in_several_processes(
    error: Exception, nans: bool, in_one_line: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exited(Exception):
        """The process has printed a traceback and exited."""

    for name in ("_initialize", "Heartbeats", "CoordinatorBoard", "set_heartbeats", "set_place"):
        monkeypatch.setattr(join, name, MagicMock())
    monkeypatch.setattr(join, "exit_process", MagicMock(side_effect=Exited))
    settings = DistributedConfig(coordinator="127.0.0.1:1", num_processes=2, process_id=0)
    with (
        jax.debug_nans(nans),
        pytest.raises(type(error) if in_one_line else Exited),
        join.joined(settings, is_reported),
    ):
        raise error


def test_a_peer_failure_while_reading_is_not_a_damaged_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    error = JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Barrier_id: restore")

    def fail(*_: object) -> None:
        raise error

    empty = SimpleNamespace(metadata={"params": {}})
    monkeypatch.setattr("orbax.checkpoint.v1.checkpointables_metadata", lambda path: empty)
    monkeypatch.setattr("orbax.checkpoint.v1.load_checkpointables", fail)
    with pytest.raises(UserError, match="1 is damaged or does not match the settings: params"):
        checkpoint._load(Path("1"), "params", None)
    monkeypatch.setattr(processes, "_count", 2)
    with pytest.raises(JaxRuntimeError):
        checkpoint._load(Path("1"), "params", None)
    error = JaxRuntimeError("NOT_FOUND: no such array")
    with pytest.raises(UserError, match="no such array"):
        checkpoint._load(Path("1"), "params", None)


def test_processes_need_equal_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimpleNamespace(process_index=index) for index in (0, 0, 1)]
    monkeypatch.setattr(processes.jax, "devices", lambda: devices)
    monkeypatch.setattr(processes, "_count", 2)
    with pytest.raises(UserError, match=r"the processes have \[1, 2\] devices: start all with the same number"):
        processes.same_on_all(lambda: 1, lambda _: {})


def test_every_process_needs_devices_in_the_mesh() -> None:
    config = small_run(batch_size=6)
    with pytest.raises(UserError, match=r"1 of 4 devices in use \(data 1\), but 2 processes .* use --mesh.data -1, "):
        resolve(config, 4, processes=2)
    assert resolve(config, 4)[0] == MeshConfig(data=1)
    assert resolve(replace(config, mesh=MeshConfig()), 4, processes=2)[0] == MeshConfig(data=4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "mesh"),
    [(n, axis) for n in (2, 4) for axis in ("data", "fsdp", "tensor")]
    + [(4, "data and tensor"), (4, "fsdp and tensor"), (4, "data, padded")],
)
def test_as_one_process(place: None, processes: int, mesh: str) -> None:
    length = flags(train__steps=8, **({"train__batch_size": 5} if "padded" in mesh else {}))
    mesh = mesh.removesuffix(", padded")
    sizes = {"mesh__data": 1} | {f"mesh__{axis}": 2 if "and" in mesh else processes for axis in mesh.split(" and ")}
    with launched(processes, "shakespeare", *TINY, *length, *flags(**sizes), "--out", "several") as launcher:
        out, err = launcher.communicate(timeout=300)
    assert (launcher.returncode, err) == (0, "")
    assert out.count("a sample, after") == 1
    one = jaxgpt("train", "shakespeare", *TINY, *length, "--out", "one", "--mesh.data", "1")
    assert_same_figures("several", "one")
    assert out.split("--- a sample")[1].split("run ")[0] == one.out.split("--- a sample")[1].split("run ")[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "to", "before", "after"),
    [(signal.SIGTERM, "one", 2, 4), (signal.SIGINT, "all", 2, 1), (signal.SIGTERM, "launcher", 1, 2)],
)
def test_stopped_and_resumed_by_another_number_of_processes(
    place: None, number: int, to: str, before: int, after: int
) -> None:
    length = flags(train__steps=60)
    with launched(before, "shakespeare", *TINY, *length, "--out", "run") as launcher:
        wait_until(lambda: reached("run", 6), launcher)
        for pid in {"one": children(launcher)[1:], "all": children(launcher), "launcher": [launcher.pid]}[to]:
            os.kill(pid, number)
        _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 75, err
    step = max(checkpoints(Path("run/checkpoints")))
    asked = "" if to == "one" else STOPPING  # process 0 reports, and only its own signals
    assert err == f"{asked}jaxgpt: stopped and saved at step {step}; resume with: jaxgpt train --resume --out run\n"
    with launched(after, "--resume", "--out", "run") as launcher:
        _, err = launcher.communicate(timeout=300)
    resuming = f"jaxgpt: resuming from run/checkpoints/{step} at step {step}/60\n"
    assert (launcher.returncode, err) == (0, resuming)
    jaxgpt("train", "shakespeare", *TINY, *length, "--out", "straight", "--mesh.data", "1")
    assert_same_figures("run", "straight")


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_launcher_forwards_signals(place: None, number: int) -> None:
    """All save the same step, one prints how to resume, and no process is left."""
    with launched(2, "shakespeare", *TINY, *flags(train__steps=100000), "--out", "run") as launcher:
        wait_until(lambda: reached("run", 6), launcher)
        pids = children(launcher)
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 75, err
    last = max(checkpoints(Path("run/checkpoints")))
    saved = f"jaxgpt: stopped and saved at step {last}; resume with: jaxgpt train --resume --out run\n"
    assert err == STOPPING + saved
    assert find_damage(Path("run/checkpoints", str(last))) == ""
    assert last == max(line["step"] for line in comparable("run") if "loss" in line) + 1
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.long
def test_no_orphans(place: None) -> None:
    """If the launcher is killed, its processes save and exit."""
    with launched(2, "shakespeare", *TINY, *flags(train__steps=100000), "--out", "run") as launcher:
        wait_until(lambda: reached("run", 6), launcher)
        pids = children(launcher)
        launcher.kill()
        end = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < end
            time.sleep(0.1)
    done = max(line["step"] for line in comparable("run") if "loss" in line) + 1
    assert max(checkpoints(Path("run/checkpoints"))) == done
