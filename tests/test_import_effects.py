"""An import of a module of jaxgpt changes nothing of the process, except the XLA flag for correct results."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys

import pytest
from helpers import repository

from jaxgpt.runtime import MISCOMPILING, SAFE_FLAG

FILES = sorted((repository() / "jaxgpt").rglob("*.py"))
# Packages of extras that a module imports at its top, to define a subclass; other modules import them when needed.
OF_EXTRAS = {"lm_eval"}

# Imports the modules of a list in their order, and prints what each changes.
WATCH = """
import gc, importlib, json, logging, os, signal, sys, threading, warnings

def state():
    loggers = {name: logging.getLogger(name) for name in list(logging.root.manager.loggerDict)}
    found = {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "loggers": {name: (each.level, len(each.handlers)) for name, each in loggers.items() if each.level},
        "root logger": (logging.root.level, len(logging.root.handlers)),
        "warnings": [str(each) for each in warnings.filters],
        "garbage collection": gc.get_threshold(),
        "threads": threading.active_count(),
        "path": list(sys.path),
        "hooks": (str(sys.excepthook), str(sys.unraisablehook), str(threading.excepthook)),
    }
    if "jax" in sys.modules:
        jax = sys.modules["jax"]
        found["jax.config"] = {name: str(value) for name, value in jax.config.values.items()}
        found["backends"] = sys.modules["jax._src.xla_bridge"].backends_are_initialized()
    return found

theirs, ours = json.loads(sys.stdin.read())
changes = {}
for name in theirs:
    importlib.import_module(name)
before = state()
for name in ours:
    importlib.import_module(name)
    after = state()
    changed = [key for key in after if after[key] != before[key]]
    if changed:
        changes[name] = {key: [before[key], after[key]] for key in changed}
    before = after
print(json.dumps(changes))
"""


def module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported_by_a_module(tree: ast.Module) -> set[str]:
    """Return the modules of other packages that a file imports when it is imported."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name for name in names if name.split(".")[0] not in ("jaxgpt", "__future__")}


@pytest.fixture(scope="module")
def changes() -> dict[str, dict[str, list[object]]]:
    """What the import of each module changes, after the import of the other packages."""
    missing = {name for name in OF_EXTRAS if importlib.util.find_spec(name) is None}
    theirs = set[str]()
    ours = list[str]()
    for path in FILES:
        imported = imported_by_a_module(ast.parse(path.read_text("utf-8")))
        if missing & {name.split(".")[0] for name in imported}:
            continue
        theirs |= imported
        ours.append(module(path.relative_to(repository()).as_posix()))
    words = json.dumps([sorted(theirs), [name for name in ours if name != "jaxgpt.__main__"]])
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", WATCH], input=words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_only_the_package_itself_changes_the_environment(changes: dict[str, dict[str, list[object]]]) -> None:
    from jaxlib.version import __version__ as version

    if not version.startswith(tuple(f"{each}." for each in MISCOMPILING)):
        assert changes == {}
        return
    assert list(changes) == ["jaxgpt"]
    [(before, after)] = changes["jaxgpt"].values()
    assert after == before | {"XLA_FLAGS": SAFE_FLAG}  # type: ignore[operator]
