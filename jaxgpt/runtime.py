"""Configure XLA and JAX before they start: compiler flags, the compilation cache, and the search for TPUs."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from jaxgpt.cpu import cpu_kind
from jaxgpt.downloads import cache_dir

# XLA's CPU backend in these versions of jaxlib miscompiles some fused reductions: sum((E @ full_like(E, c)) * E, -1) under
# jit gives NaN or 1e31. `jaxgpt verify` shows whether other versions miscompile them.
MISCOMPILING = ("0.10", "0.11", "0.12")
SAFE_FLAG = "--xla_cpu_experimental_ynn_fusion_type=-reduce"
# The default preset's step compiles in 14% less time if LLVM does not unroll loops, and runs as fast (benchmarks/LOG.md).
# Unless the threshold is 0, jaxlib 0.12 compiles while loops without library calls to single-threaded code, even large loops.
QUICK_FLAG = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling=true,xla_cpu_small_while_loop_byte_threshold=0"
COMPILED_BYTES = 2 * 2**30  # maximum size of the persistent compilation cache, in bytes


class MiscompiledReductions(RuntimeWarning):
    """Warning that this jaxlib can miscompile fused reductions in XLA's CPU backend."""


def set_safe_flag() -> None:
    """If jaxlib miscompiles, add `SAFE_FLAG` to XLA_FLAGS; warn if the flag is missing and cannot be added.

    No warning is given if JAX has started with a backend other than the CPU.

    `import jaxgpt` calls this function, and changes nothing else in the process.
    """
    if add_flag(SAFE_FLAG):
        return
    if has_started() and sys.modules["jax"].default_backend() != "cpu":
        return
    file = flags_file()
    reason = (
        "XLA's CPU backend started before jaxgpt was imported" if has_started() else f"XLA_FLAGS is the file {file}"
    )
    wrong = "fused reductions are on, which this version of jaxlib can miscompile to wrong numbers"
    fix = f"add {SAFE_FLAG} to {file or 'XLA_FLAGS'} and restart Python"
    warnings.warn(f"{reason}: {wrong}; {fix}", MiscompiledReductions, stacklevel=3)


def set_quick_flag() -> None:
    """Add `QUICK_FLAG` to XLA_FLAGS, if XLA has not started. Commands, `train`, `build` and `load` call this function."""
    add_flag(QUICK_FLAG)


def add_flag(flag: str) -> bool:
    """Add a flag for the versions in `MISCOMPILING` to XLA_FLAGS, and return whether it is set or not needed.

    A flag is not added if its option is already set. Flags cannot be added if XLA_FLAGS is a file name, or after XLA has
    started and read its flags. Other versions get no flag, because XLA aborts on unknown flags.
    """
    from jaxlib.version import __version__ as version

    if not version.startswith(tuple(f"{known}." for known in MISCOMPILING)):
        return True

    flags = os.environ.get("XLA_FLAGS", "").strip()
    file = flags_file()
    known = file.read_text("utf-8", "replace") if file and file.is_file() else flags
    if flag.split("=")[0] in known:
        return True
    if file or has_started():
        return False
    os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()
    return True


def flags_file() -> Path | None:
    """Return the file with XLA's flags; None: XLA_FLAGS is not set, or holds the flags itself."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    return Path(flags) if flags and not flags.startswith("-") else None


def has_started() -> bool:
    """Return whether XLA has started, so that new flags have no effect."""
    bridge = sys.modules.get("jax._src.xla_bridge")  # private module, without a public equivalent
    return bridge is not None and bool(bridge.backends_are_initialized())


def keep_compiled() -> None:
    """Enable JAX's persistent compilation cache. JAX's own environment variables take precedence.

    Compiled CPU programs use the instructions of the CPU that compiled them. On a CPU without these instructions, JAX only
    logs an error and loads the program, which can crash, so each kind of CPU has a separate directory.
    """
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # The cache key of cuDNN attention contains a pointer, which differs between processes.
    os.environ.setdefault("JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY", "true")
    directory = str(cache_dir() / "compiled" / cpu_kind())
    # Limit only this directory: entries that other programs wrote without a limit lack the access times that JAX's LRU
    # eviction reads.
    if os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", directory) == directory:
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(COMPILED_BYTES))


def skip_missing_tpus() -> None:
    """Without TPUs, keep JAX from searching for them: libtpu may be installed only for `jaxgpt plan`.

    Has no effect if the user sets JAX_PLATFORMS.
    """
    tpus = [*Path("/dev").glob("accel*"), *Path("/dev").glob("vfio/[0-9]*")]
    if "JAX_PLATFORMS" not in os.environ and not tpus:
        quiet_libtpu()


def quiet_libtpu() -> None:
    """Configure libtpu to compile on a machine without TPUs: no search, no logs, no lock.

    Call this before libtpu is loaded.
    """
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        # The lock protects TPU chips, and compiling does not use them: several plans can run concurrently.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def debugs_nans() -> bool:
    """Return whether JAX raises `FloatingPointError` for non-finite results of compiled functions."""
    jax = sys.modules.get("jax")
    return jax is not None and bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)
