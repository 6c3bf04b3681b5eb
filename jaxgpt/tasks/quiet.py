"""Contexts for calls of lm-evaluation-harness: without its output, its side effects on the process, and the network."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np

FEWSHOT_SEED = 1234  # the harness' default
LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "fsspec", "evaluate")


@contextmanager
def quiet() -> Iterator[None]:
    """Let the harness print nothing, compute in this process, and leave the random generators of Python and NumPy unchanged.

    The environment variables TQDM_DISABLE, which tqdm reads only when it is imported, and DISABLE_MULTIPROC stay set.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Otherwise, the harness' bootstrap forks a process that has JAX's threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with unchanged_random_state(), silent_loggers(), redirect_stdout(_OtherThreads(sys.stdout)):
        random.seed(0)
        np.random.seed(FEWSHOT_SEED)
        yield


class _OtherThreads:
    """A stream that drops text from its creating thread, and forwards text from other threads, such as progress lines."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, unless it comes from the thread that created the stream."""
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the global random generators of Python and NumPy at the end."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def silent_loggers() -> Iterator[None]:
    """Silence the loggers of the harness and its libraries: their errors also raise exceptions."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def offline() -> Iterator[None]:
    """Let `datasets` read only its cache and local files, without a network."""
    import datasets.config
    from huggingface_hub import constants

    modules: Any = (datasets.config, constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
