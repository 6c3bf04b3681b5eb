"""The import order: a package imports only earlier packages, and importing jaxgpt starts no backend."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import nodes, repository

# From the bottom up; docs/code.md describes each.
ORDER = """
    errors suggestions out_of_memory exception_notes progress strict_json locks atomic files downloads directories
    listing record_files hub early_end signals time_limit cpu heap runtime settings
    mix reward_words template_variables options prepare_options distributed_options
    model_settings data_settings train_settings post_settings config config_changes data_files config_json presets
    ops model train decoding
    provenance counts kernels data report parallel checkpoint trainer lm tasks
    convert study verify plan bench follow post cli
""".split()
LEVEL = {package: level for level, package in enumerate(ORDER)}
CORE = ("ops", "model", "train", "decoding")
FILES = sorted((repository() / "jaxgpt").rglob("*.py"))


def package(path: Path) -> str:
    return path.relative_to(repository() / "jaxgpt").parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Return the packages that a file imports, including imports under TYPE_CHECKING."""
    found = set()
    for node in nodes(path.read_text()):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxgpt."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "jaxgpt":
            found |= {alias.name for alias in node.names if alias.name in LEVEL}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("jaxgpt.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(repository())))
def test_a_package_imports_only_earlier_packages(path: Path) -> None:
    if package(path) in ("__init__", "__main__"):
        return
    for other in imports(path) - {package(path)}:
        assert LEVEL[other] < LEVEL[package(path)], f"{package(path)} must not import {other}"


def core_files() -> list[Path]:
    return [path for path in FILES if package(path) in CORE]


@pytest.mark.parametrize("path", core_files(), ids=lambda p: str(p.relative_to(repository())))
def test_the_core_knows_no_files_processes_or_backends(path: Path) -> None:
    """The operations that make a backend fast reach the core as one value, from `kernels`."""
    assert imports(path) <= {"errors", "suggestions", "settings", "options", "config", *CORE}
    words = set(re.findall(r"[a-z_]+", path.read_text().lower()))
    machines = "cpu cpus gpu gpus tpu tpus xla cuda cudnn platform platforms backend backends default_backend"
    assert not words & {*machines.split(), "platform_dependent", "set_xla_metadata"}


def test_every_package_is_in_the_order() -> None:
    assert {package(path) for path in FILES} - {"__init__", "__main__"} == set(LEVEL)


def test_importing_starts_no_backend() -> None:
    code = "import sys, jaxgpt; assert 'jax' not in sys.modules; import jaxgpt.lm, jaxgpt.study.plot; "
    code += "from jax._src import xla_bridge as b; assert not b.backends_are_initialized(); "
    code += "assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
