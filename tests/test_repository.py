"""The files around the package: CI, hooks, metadata, and what a wheel and an sdist contain."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import repository

import jaxgpt

ROOT = repository()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def workflow(name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the only job of a workflow, and the stages of .ci/run that it calls."""
    [job] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run ${{ matrix.stages }}"]
    return job, " ".join(job["strategy"]["matrix"]["stages"]).split()


def stages(name: str) -> list[str]:
    """Return the words of an array of .ci/run."""
    [line] = re.findall(rf"^{name}=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), flags=re.M)
    return line.split()


def test_ci_calls_the_script_that_contributors_run() -> None:
    job, in_jobs = workflow("ci.yml")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert job["timeout-minutes"] > 45  # minutes of all stages on 2 cores
    assert sorted(in_jobs) == sorted(stages("stages"))


def test_a_nightly_job_runs_the_tests_that_ci_leaves_out() -> None:
    _, in_jobs = workflow("nightly.yml")
    assert in_jobs == stages("nightly")
    assert "pytest --long\n" in (ROOT / ".ci" / "run").read_text()


def test_the_list_of_slow_tests_names_functions_that_exist() -> None:
    """A slow test that is renamed would otherwise return to the default tests."""
    lines = (ROOT / "tests" / "seconds.txt").read_text().splitlines()
    functions = {line.partition("\t")[2].partition("[")[0] for line in lines}
    for file in {function.partition("::")[0] for function in functions}:
        source = (ROOT / file).read_text("utf-8")
        wanted = {name for path, _, name in (each.partition("::") for each in functions) if path == file}
        assert {name for name in wanted if f"def {name}(" not in source} == set(), file


def test_an_unknown_stage_of_ci_is_rejected() -> None:
    made = subprocess.run([ROOT / ".ci" / "run", "lint", "tset"], capture_output=True, text=True)
    assert made.returncode == 2
    assert made.stdout == ""
    assert made.stderr == "unknown stage: tset; stages: lint site tests newest run tpu long\n"


def test_one_command_fills_in_the_url_of_the_repository(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "docs" / "tools" / "repository.py"))
    for name in tool["FILES"]:
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    old = PROJECT["urls"]["Repository"]

    tool["write"](tmp_path, "https://git.example.org/me/gpt")

    texts = {name: (tmp_path / name).read_text("utf-8") for name in tool["FILES"]}
    assert [name for name, text in texts.items() if old in text or "OWNER" in text] == []
    assert [name for name, text in texts.items() if "https://git.example.org/me/gpt" not in text] == []
    urls = tomllib.loads(texts["pyproject.toml"])["project"]["urls"]
    assert urls["Changelog"] == "https://git.example.org/me/gpt/blob/main/CHANGELOG.md"
    assert "git clone https://git.example.org/me/gpt && cd gpt\n" in texts["README.md"]


def test_the_url_of_the_repository_is_only_where_the_tool_writes_it() -> None:
    tool = runpy.run_path(str(ROOT / "docs" / "tools" / "repository.py"))
    old = PROJECT["urls"]["Repository"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    places = {path.relative_to(ROOT).as_posix() for path in pages if old in path.read_text("utf-8")}
    assert places <= set(tool["FILES"])


def test_hooks_run_the_commands_of_ci() -> None:
    [repo] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    ci = (ROOT / ".ci" / "run").read_text()
    entries = [hook["entry"].split(" ", 1) for hook in repo["hooks"]]
    assert [program for program, *_ in entries] == ["ruff", "ruff", "mypy"]
    assert [entry for entry in entries if " ".join([f'"$bin/{entry[0]}"', *entry[1:]]) not in ci] == []


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (jaxgpt.__version__, PROJECT["license"])


def test_the_readme_is_short() -> None:
    """The README has at most 1,000 words, and six commands after the clone and before the example in Python."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.split()) <= 1000
    blocks = text.split("```python")[0].split("```sh\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].strip().splitlines()]
    assert len([line for line in lines if not line.startswith("git clone ")]) <= 6


@pytest.mark.ci
def test_the_wheel_and_the_sdist_contain_what_they_need(tmp_path: Path) -> None:
    """The sdist is built from the tracked files, and the wheel from the sdist."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    out = tmp_path / "out"
    out.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)

    def build(kind: str, where: Path) -> Path:
        code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
        made = subprocess.run([sys.executable, "-c", code, str(out)], cwd=where, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        return out / made.stdout.splitlines()[-1]

    with tarfile.open(build("sdist", source)) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.glob("jaxgpt-*")
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    generated = {"PKG-INFO", "setup.cfg"}
    kept = {name for name in names - generated if ".egg-info/" not in name}
    assert set(filter(None, tracked.split("\0"))) - kept == set(), "tracked files that are missing in the sdist"

    with zipfile.ZipFile(build("wheel", unpacked)) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
        [metadata] = [name for name in wheel.namelist() if name.endswith("METADATA")]
        text = wheel.read(metadata).decode()
    assert inside == {name for name in kept if name.startswith("jaxgpt/")}
    assert f"Version: {jaxgpt.__version__}" in text
    assert "Classifier: Programming Language :: Python :: 3.13" in text
