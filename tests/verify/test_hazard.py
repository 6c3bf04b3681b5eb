"""XLA's miscompiled reductions are disabled however Python is started, or a warning prints the flag to set."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from helpers import repository

from jaxgpt.runtime import QUICK_FLAG, SAFE_FLAG, MiscompiledReductions, set_quick_flag, set_safe_flag

FLAG = SAFE_FLAG.split("=")[0]
MEASURE = """
from jaxgpt.verify import LAWS, fresh, verify
from jaxgpt.config import Config, ModelConfig
law = next(law for law in LAWS if "XLA" in law.name)
[row] = verify(fresh(Config(model=ModelConfig(vocab_size=3, n_layer=1, n_embd=4, n_head=1))), [law])
print("held" if row.ok else "failed", row.note)
"""


def python(code: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    """Run code in a process without the environment of the tests, compiled as users have it."""
    ours = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    env = {k: v for k, v in os.environ.items() if k not in ours} | ({"XLA_FLAGS": flags} if flags else {})
    env["PYTHONPATH"] = str(repository())
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Return XLA_FLAGS and the warnings after both functions, in a process without a backend."""

    def run(flags: str) -> tuple[str, list[str]]:
        monkeypatch.setenv("XLA_FLAGS", flags)
        with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as without:
            warnings.simplefilter("always")
            without.delitem(sys.modules, "jax._src.xla_bridge")
            set_safe_flag()
            set_quick_flag()
        return os.environ["XLA_FLAGS"], [str(w.message) for w in caught if w.category is MiscompiledReductions]

    return run


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ("", f"{SAFE_FLAG} {QUICK_FLAG}"),
        ("--xla_cpu_prefer_vector_width=256", f" {SAFE_FLAG} {QUICK_FLAG}"),
        (SAFE_FLAG, f" {QUICK_FLAG}"),
        (f"{FLAG}=+reduce", f" {QUICK_FLAG}"),  # the user's own choice
        ("--xla_backend_extra_options=xla_cpu_disable_loop_unrolling=false", f" {SAFE_FLAG}"),
    ],
)
def test_flags_are_added_unless_they_are_set(start, flags: str, added: str) -> None:  # type: ignore[no-untyped-def]
    assert start(flags) == (flags + added, [])


@pytest.mark.parametrize(
    ("version", "known"), [("0.10.2", True), ("0.12.0", True), ("0.13.0", False), ("0.1.9", False)]
)
def test_other_versions_of_jaxlib_get_no_flags(
    start,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    known: bool,
) -> None:
    """XLA aborts on flags that it does not have."""
    monkeypatch.setattr("jaxlib.version.__version__", version)
    assert start("")[0] == (f"{SAFE_FLAG} {QUICK_FLAG}" if known else "")


def test_flags_in_a_file(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """XLA reads a value without a leading dash as a file name, so no flag can be appended."""
    file = tmp_path / "flags"
    file.write_text("--xla_cpu_prefer_vector_width=256\n")
    flags, [said] = start(str(file))
    assert flags == str(file)
    assert f"{file}: fused reductions are on" in said
    assert f"add {SAFE_FLAG} to {file}" in said
    file.write_text(f"--xla_cpu_prefer_vector_width=256\n{SAFE_FLAG}\n")
    assert start(str(file)) == (str(file), [])


def test_large_loops_use_all_cores() -> None:
    """jaxlib 0.12 compiles them as one kernel by default: every operation, even a matrix product, then runs on one core."""
    code = (
        "import jaxgpt.runtime, jax; jaxgpt.runtime.set_quick_flag();"
        "x = jax.numpy.ones((1, 1000)); w = jax.numpy.ones((1000, 1000));"
        "loop = lambda x, n: jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] @ w, c[1] + 1), (x, 0))[0];"
        "print('small_call' in jax.jit(loop).lower(x, 3).compile().as_text())"
    )
    assert python(code).stdout == "False\n"


@pytest.mark.long
def test_a_backend_started_before_the_import() -> None:
    """It is too late to set flags: there is one warning with the fix, and the row of verify fails."""
    late = python("import jax; jax.devices(); import jaxgpt" + MEASURE)
    assert late.stderr.count("MiscompiledReductions") == 1, late.stderr
    assert f"add {SAFE_FLAG} to XLA_FLAGS" in late.stderr
    assert late.stdout.startswith("failed"), late.stdout
    assert SAFE_FLAG in late.stdout


@pytest.mark.long
def test_jax_imported_before_but_not_used() -> None:
    """With other flags set and jax imported first, results are right and there is no warning."""
    early = python("import jax, jaxgpt" + MEASURE, "--xla_cpu_prefer_vector_width=256")
    assert (early.stdout, early.stderr) == ("held \n", "")


@pytest.mark.parametrize("program", [["train.py", "--help"], ["-m", "jaxgpt", "--help"]])
def test_every_entry_point_warns_once(program: list[str], tmp_path: Path) -> None:
    (tmp_path / "flags").touch()
    env = os.environ | {"XLA_FLAGS": str(tmp_path / "flags")}
    done = subprocess.run(
        [sys.executable, *program], capture_output=True, text=True, check=True, env=env, cwd=repository()
    )
    assert done.stderr.count("MiscompiledReductions") == 1
