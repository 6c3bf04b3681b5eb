"""Commands of README and docs/: each is parsed by its own parser, and the quick ones run here.

Cells run when the site is built, and the Python blocks of docs/inside.md in `tests/test_docs.py`.
"""

from __future__ import annotations

import argparse
import itertools
import re
import runpy
import shlex
import shutil
import string
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from helpers import TEXT, jaxgpt, parsed, repository

import jaxgpt as package
from jaxgpt.cli.parse import COMMANDS
from jaxgpt.cli.settings import named_config, with_settings
from jaxgpt.presets import PRESETS

ROOT = repository()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
Words = tuple[str, ...]

# Run in this order by `test_the_quick_commands_and_python_blocks_run`, as written, on small runs with the names of the pages.
RUN = """
jaxgpt --version
jaxgpt presets
jaxgpt presets --json
jaxgpt info runs/python-char
jaxgpt info gpt2
jaxgpt sample runs/python-char --prompt 'class ' --top-p 0.9 --stream
jaxgpt sample runs/python-char --prompt 'def ' --top-p 0.9 --stream
jaxgpt sample runs/python-char --prompt 'def ' --check-memorized
jaxgpt explain runs/python-char --prompt 'def ' --top-k 40
jaxgpt inspect runs/python-char --prompt 'def ' --html page.html
jaxgpt eval runs/python-char
jaxgpt eval runs/python-char --weights int8
jaxgpt eval runs/mine
jaxgpt plot runs/python-char
jaxgpt plot runs/mine
jaxgpt plot runs/mine --follow
jaxgpt follow runs/mine --to tensorboard
jaxgpt plot runs/mine runs/other --out losses.svg
jaxgpt train --resume --out runs/mine
jaxgpt data report shakespeare --data.path my.txt
jaxgpt plan gpt2 --topology h100:8
"""

# Third-party programs, which are not parsed. Commands of jaxgpt inside srun and gcloud are parsed.
OTHERS = set(
    ".ci/run mypy ruff [ break cd do done exit export for git gcloud scontrol source srun ssh while xdg-open".split()
)


def commands(text: str) -> Iterator[Words]:
    """Split the text of a shell into commands, and each into words."""
    text = re.sub(r"(?m)(^|\s+)#.*$|^\w+=\$\(.*\)$", "", text).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if set(word) <= set(";&|\n"):
            if words:
                yield tuple(words)
            words = []
        else:
            words.append(word)


def blocks(page: Path) -> list[Words]:
    """Return the commands of a page's blocks: `sh` blocks and files, and lines after a `$` in blocks without a language."""
    found: list[Words] = []
    for language, block in re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text("utf-8"), flags=re.M | re.S):
        file = language.removeprefix("{literalinclude} ")
        if language == "sh":
            found += commands(block)
        elif file.endswith(".sh"):
            found += commands((page.parent / file).read_text("utf-8"))
        elif language in ("", "console"):
            prompts = [line.removeprefix("$ ") for line in block.splitlines() if re.match(r"\$ |jaxgpt |python ", line)]
            found += [words for line in prompts for words in commands(line)]
    return found


def inline(page: Path) -> list[Words]:
    """Return the commands within sentences and tables of a page, except those with parts to fill in such as [--long]."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    found = re.findall(r"(?<!`)`((?:jaxgpt|python|pytest|pip) [^`]+)`(?!`)", text)
    return [
        words
        for line in found
        if not re.search(r"\[-|\[[A-Z]|\.\.\.", line)
        for words in commands(" ".join(line.split()))
    ]


def every(*sources: object) -> list[Words]:
    return sorted({words for page in PAGES for source in sources for words in source(page)})  # type: ignore[operator]


def bare(words: Words) -> Words:
    """Drop assignments to the environment, nohup, srun with its options, and redirections."""
    words = tuple(itertools.takewhile(lambda word: not re.fullmatch(r"\d*[<>]", word), words))
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if words[:1] in (("srun",), ("nohup",)):
        words = words[next(i for i, word in enumerate(words) if word in ("jaxgpt", "python")) :]
    if words[:2] == ("python", "train.py"):
        words = ("jaxgpt", "train", *words[2:])
    return ("jaxgpt", *words[3:]) if words[:3] == ("python", "-m", "jaxgpt") else words


def parse(words: Words) -> None:
    """Parse a command of jaxgpt: its options, their values, and the settings that result for a preset."""
    if len(words) == 1 or words[1] in ("--help", "--version", "COMMAND"):
        return
    words = tuple(word for word in words if word != "--help")  # --help would print and exit
    name = " ".join(words[1:3]) if " ".join(words[1:3]) in COMMANDS else words[1]
    rest = words[1 + len(name.split()) :]
    if not rest:  # only the name of the command
        return
    given = parsed(name, *rest)
    if name == "launch":
        parse(("jaxgpt", *given["command"]))
    elif given.get("target", "") in ("", *PRESETS) and not given.get("init_from"):
        settings = {name: value for name, value in given.get("settings", {}).items() if name != "lora.rank"}
        with_settings(named_config(given.get("target", "")), settings)


@pytest.mark.ci
@pytest.mark.parametrize("words", every(blocks, inline), ids=shlex.join)
def test_every_command_is_accepted_by_its_parser(words: Words) -> None:
    words = bare(words)
    match words:
        case ("jaxgpt", *_):
            parse(words)
        case ("pip", "install", *rest) | ("python", "-m", "pip", "install", *rest):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for names in re.findall(r"(?:^\.|^jaxgpt)\[(.*?)\]", "\n".join(rest), flags=re.M):
                assert set(names.split(",")) <= set(extras)
            for file in re.findall(r"^-r\n(\S+)$", "\n".join(rest), flags=re.M):
                assert (ROOT / file).exists()
        case ("pytest", *rest):
            paths = [word for word in rest if word.startswith("tests")]
            sources = [ROOT / path.partition("::")[0] for path in paths]
            files = [file for path in sources for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
            assert all(path.exists() for path in sources)
            for selected in [rest[i + 1] for i, word in enumerate(rest) if word == "-k"]:
                text = "".join(file.read_text("utf-8") for file in files).lower()
                assert all(word in text for word in selected.lower().split() if word not in ("or", "and", "not"))
        case ("python" | "python3", file, *_) if file.endswith(".py"):
            assert (ROOT / file).exists() or file == "mine.py"
        case ("gcloud", "compute", "tpus", "queued-resources", *_):
            pass
        case ("gcloud" | "ssh", *rest):
            inner = rest[-1].removeprefix("--command=").replace("$i", "1")
            assert [parse(bare(each)) for each in commands(inner) if bare(each)[:1] == ("jaxgpt",)] == [None]
        case ("python" | "python3", "-m" | "-c", *_):
            pass
        case _:
            assert not words or words[0] in OTHERS, "neither a command of jaxgpt nor a known program"


def test_the_quick_commands_are_on_a_page() -> None:
    assert set(commands(RUN)) - set(every(blocks)) == set()


@pytest.mark.ci
def test_the_quick_commands_and_python_blocks_run() -> None:
    """Small runs replace runs that take minutes; the commands match the pages word for word."""
    Path("my.txt").write_text(TEXT + string.printable)
    small = (
        "--data.path my.txt --model.n-layer 1 --model.n-head 2 --model.n-embd 16 --model.block-size 64 --train.steps 2"
    )
    for name in ("python-char", "mine", "other"):
        out = jaxgpt(*shlex.split(f"train {small} --out runs/{name}"))
        assert out.code == 0, out
    shutil.copytree("runs/mine", "runs/smollm2")
    for words in commands(RUN):
        out = jaxgpt(*words[1:])
        assert out.code == 0, (shlex.join(words), out)
    assert all(Path(file).stat().st_size for file in ("page.html", "losses.svg", "runs/mine/loss.png"))
    lm = package.load("runs/python-char")
    given = {"jax": jax, "jaxgpt": package, "lm": lm, "tokens_BT": lm.tokenizer.encode("def main():")[None]}
    for page, blocks_of_page in python_blocks().items():
        for block in blocks_of_page:
            Path("block.py").write_text(block)
            runpy.run_path("block.py", init_globals=given, run_name=page)
    assert Path("chats.jsonl").read_text().count("\n") == 30


@pytest.mark.ci
def test_the_readme_shows_lines_of_the_plan_that_its_command_prints() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    found = re.search(r"^(jaxgpt plan .*)\n```\n\n.*\n\n```\n((?:.*\n)*?)```", page, flags=re.M)
    assert found
    printed = jaxgpt(*shlex.split(found[1])[1:])
    assert set(found[2].splitlines()) - set(printed.out.splitlines()) == set()


def python_blocks() -> dict[str, list[str]]:
    """Return the blocks of pages that run here.

    Those of docs/inside.md and docs/scaling.md run in tests/test_docs.py; chat needs a template (tests/test_chat.py), plans
    for TPUs need libtpu (tests/plan), and tasks lm-evaluation-harness (tests/tasks).
    """
    found = {
        page.name: re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.M | re.S) for page in PAGES
    }
    return {
        name: [block for block in parts if not re.search("jaxgpt.chat|parse_topology|open_tasks", block)]
        for name, parts in found.items()
        if parts and name not in ("inside.md", "scaling.md")
    }


class _ParsedError(Exception):
    """Arguments were accepted."""


@pytest.mark.ci
@pytest.mark.parametrize(
    "words", [w for w in every(blocks, inline) if re.match(r"python (benchmarks|tests)/", " ".join(w))], ids=shlex.join
)
def test_every_script_accepts_its_arguments(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script runs up to the parsing of its arguments."""
    file = ROOT / words[1]
    if "argparse" not in file.read_text():
        return
    real = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *args: object) -> None:
        real(self, *args)  # type: ignore[call-overload]
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [str(file), *words[2:]])
    monkeypatch.syspath_prepend(str(file.parent))
    with pytest.raises(_ParsedError):
        runpy.run_path(str(file), run_name="__main__")
