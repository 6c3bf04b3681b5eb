"""Strict JAX types, eight CPU devices, and the location of test data."""

from __future__ import annotations

import gc
import json
import os
import signal

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib
import pytest
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken

import jaxgpt  # sets the XLA flag before a backend starts
from jaxgpt.heap import GARBAGE
from jaxgpt.runtime import set_quick_flag

QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

jax.config.update("jax_numpy_rank_promotion", "raise")
set_quick_flag()

assert jaxgpt.__version__

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in background jobs of a script; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Fixtures give each test, not each example, a directory; that suffices for examples that overwrite one file.
settings.register_profile(
    "jaxgpt",
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("jaxgpt")


# CPU seconds of the tests that take at least 1 s: a line for each, with the seconds, a tab and the id of the test.
# `pytest --ci --measure FILE` measures them.
SECONDS = Path(__file__).parent / "seconds.txt"
# Tests that take more CPU seconds than this are omitted from the default tests, and from the tests of CI. --long runs all.
MOST_BY_DEFAULT = 1
MOST_IN_CI = 4
# Beginnings of the ids of tests that are never omitted because of their time.
ALWAYS = ("tests/test_end_to_end.py",)
ALWAYS_IN_CI = (
    *ALWAYS,
    # Kill and resume.
    "tests/trainer/test_kills.py",
    "tests/trainer/test_loop.py::test_resumed_equals_uninterrupted_bit_for_bit",
    "tests/checkpoint/test_replace.py::test_a_kill_at_any_moment_leaves_the_old_or_the_new_run[start]",
    # Meshes: shards of each device, and equal losses.
    "tests/trainer/test_placement.py",
    "tests/trainer/test_moe_runs.py::test_the_layout_of_a_run_changes_no_loss_and_no_weight",
    "tests/trainer/test_side_outputs.py::test_the_layout_of_a_run_does_not_change_its_side_outputs[{'fsdp': 2, 'tensor'",
    # Planted bugs, and independent implementations.
    "tests/verify/test_verify.py",
    "tests/parity",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ci", action="store_true", help="run the tests of CI: cases marked ci and slow tests, too")
    parser.addoption("--long", action="store_true", help="run all tests, also those that take minutes")
    parser.addoption(
        "--measure",
        metavar="FILE",
        help="append the CPU seconds of slow tests to a file, and omit no test for its time",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure the CPU time of a test and of the processes that it starts, for --measure."""
    before = sum(os.times()[:4])
    result = yield
    seconds = sum(os.times()[:4]) - before
    target = item.config.getoption("--measure")
    if target and seconds >= 1:
        with Path(target).open("a") as file:
            file.write(f"{seconds:.1f}\t{item.nodeid}\n")
    return result


def pytest_collection_finish() -> None:
    """Collect garbage less often, as the command line does: tracing creates millions of long-lived objects."""
    gc.freeze()
    gc.set_threshold(GARBAGE)


def pytest_sessionfinish() -> None:
    """Freeze the objects that are still in use: pytest collects garbage ten times at the end."""
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Compile quickly, because most programs run once; with --long, compile as for users.

    Without the emitters of fused loops and with one LLVM module per program, compiling takes half the CPU time. Processes
    started by tests inherit the variables. XLA aborts on unknown flags, and jaxlib 0.12 no longer has the first flag.
    """
    quick = not config.getoption("--long")
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(quick)
    jax.config.update("jax_disable_most_optimizations", quick)
    if quick and jaxlib.__version__.startswith("0.10."):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    in_ci = config.getoption("--ci")
    marks = ["long"] if in_ci else ["long", "ci"]
    slow = set() if config.getoption("--measure") else slow_tests(in_ci)
    for item in items:
        if item.nodeid in slow or any(item.get_closest_marker(mark) for mark in marks):
            item.add_marker(pytest.mark.skip(reason="takes long: --ci or --long runs it"))


def slow_tests(in_ci: bool) -> set[str]:
    """Return the ids of the tests that the default tests, or the tests of CI, omit because of their time."""
    most = MOST_IN_CI if in_ci else MOST_BY_DEFAULT
    always = ALWAYS_IN_CI if in_ci else ALWAYS
    slow = set()
    for line in SECONDS.read_text().splitlines():
        seconds, _, test = line.partition("\t")
        if float(seconds) > most and not test.startswith(always):
            slow.add(test)
    return slow


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share compiled programs among tests and workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the directory of texts and recordings outside the repository."""
    path = Path(os.environ.get("JAXGPT_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no test data at {path}")
    return path


@pytest.fixture(scope="session")
def gpt2_tokenizer(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer.json from GPT-2's own two files, and return its path."""
    from jaxgpt.data.tokenizers.byte_level import byte_level_bpe

    vocab = json.loads((data_dir / "gpt2-bpe" / "encoder.json").read_text())
    _, *lines = (data_dir / "gpt2-bpe" / "vocab.bpe").read_text("utf-8").splitlines()
    library = byte_level_bpe(vocab, [tuple(line.split()) for line in lines])
    library.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    path.write_text(library.to_str())
    return path


@pytest.fixture(autouse=True)
def strict_types(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disallow implicit type promotion. Tests of updates override this, because optax relies on promotion."""
    strict = request.path.parent.name in ("ops", "kernels", "model", "decoding", "parallel", "study")
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable progress lines, so that standard error does not depend on the speed of the machine."""
    monkeypatch.setattr("jaxgpt.cli.console.EVERY", 1e6)
