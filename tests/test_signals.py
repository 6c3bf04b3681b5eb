"""A signal requests a stop of training, and ends other work; Ctrl-C twice ends a process, even inside native code."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import uvloop

from jaxgpt.signals import SIGNALS, Stop, stop_on_signal

# An entry point that prints a line and then runs native code for half an hour, which lets other threads run.
ENTRY = """
import hashlib
from jaxgpt import cli, early_end

def command(words):
    early_end.set_advice(lambda: "the checkpoint of step 4 is kept")
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

cli.main = command
cli.entry()
"""


@pytest.fixture(autouse=True)
def a_terminal() -> Iterator[None]:
    """A hangup is not ignored, even if the tests are run by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(*numbers: int) -> Stop:
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        with stop_on_signal() as stop:
            for number in numbers:
                os.kill(os.getpid(), number)
    finally:
        assert [signal.getsignal(number) for number in SIGNALS] == before
    return stop


# Ctrl-C, kill, a closed terminal, and the warnings of Slurm's --signal, of Sun Grid Engine and of a limit on CPU time.
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_signal_requests_a_stop(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert send(signal.Signals[name]).requested
    assert capfd.readouterr().err.startswith("jaxgpt: stopping after this step, then saving")


def test_other_signals_keep_their_effect() -> None:
    """Ctrl-C stops an answer of a chat, and SIGTERM the process."""
    with stop_on_signal("", [signal.SIGINT]) as stop:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested


def test_a_second_ctrl_c_raises() -> None:
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM, signal.SIGINT)


def test_a_closing_terminal_sends_several_signals(capfd: pytest.CaptureFixture[str]) -> None:
    assert send(signal.SIGHUP, signal.SIGTERM, signal.SIGHUP).requested
    assert capfd.readouterr().err.count("\n") == 1


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not send(signal.SIGHUP).requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_signal_during_an_event_loop(make_loop) -> None:  # type: ignore[no-untyped-def]
    """Orbax runs event loops, which take over the wakeup descriptor."""

    async def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)

    with stop_on_signal() as stop:
        loop = make_loop()
        loop.run_until_complete(interrupted())
        loop.close()
        assert stop.requested


def start_entry(code: str) -> subprocess.Popen[str]:
    """Start an entry point such as `ENTRY`, and wait until it is ready."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_outside_of_training_ends_native_code_with_a_line(name: str) -> None:
    process = start_entry(ENTRY)
    try:
        process.send_signal(signal.Signals[name])
        assert process.communicate(timeout=60) == ("", f"jaxgpt: ended by {name}: the checkpoint of step 4 is kept\n")
        assert process.returncode == 128 + signal.Signals[name]
    finally:
        process.kill()


def test_an_interrupt_after_the_command_ends_exit_handlers_without_a_traceback() -> None:
    """A second Ctrl-C may arrive while the exit handlers of JAX run."""
    code = """
import atexit, time
from jaxgpt import cli

def clean_up():
    print("ready", flush=True)
    time.sleep(60)

atexit.register(clean_up)
cli.main = lambda words: 0
cli.entry()
"""
    process = start_entry(code)
    try:
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == -signal.SIGINT
    finally:
        process.kill()


def test_a_signal_to_a_forked_process_does_not_end_its_parent() -> None:
    """Pools of `multiprocessing` end their workers with SIGTERM."""
    fork = """
    import os, signal, time
    child = os.fork()
    if not child:
        time.sleep(60)
    time.sleep(0.2)  # for the functions that run after a fork
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    time.sleep(0.2)  # for the thread that handles signals
    print(f"the child was ended by {status}, its parent was not")
"""
    begin, _ = ENTRY.split("    early_end.set_advice")
    code = f"{begin}{fork}\ncli.main = command\ncli.entry()\n"
    # Python 3.12 warns of a fork in a process with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("the child was ended by 15, its parent was not\n", "")


LOOP = "import asyncio, uvloop\nfor kind in (asyncio, uvloop): kind.run(asyncio.sleep(0))\n"


@pytest.mark.parametrize("before", ["", LOOP])
def test_two_presses_end_native_code(before: str) -> None:
    code = ENTRY.replace(
        '    print("ready"', "".join(f"    {line}\n" for line in before.splitlines()) + '    print("ready"'
    )
    process = start_entry(code)
    try:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "jaxgpt: interrupted: the checkpoint of step 4 is kept\n")
        assert process.returncode == 130
    finally:
        process.kill()
