"""Listing directories of text: links are followed once, and the output of jaxgpt is not text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxgpt.checkpoint.new_run import new_run
from jaxgpt.config import Config, PrepareParams
from jaxgpt.data.chat.files import find_files
from jaxgpt.data.prepared.prepare import prepare
from jaxgpt.data.prepared.sources import find_source
from jaxgpt.data.text import read_path
from jaxgpt.data.tokenizers.base import ByteTokenizer
from jaxgpt.data.tokenizers.bpe import train_bpe
from jaxgpt.directories import RUN_FILES
from jaxgpt.errors import UserError
from jaxgpt.listing import Listing, list_files
from jaxgpt.record_files import holds_records

pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.fixture(autouse=True)
def text() -> None:
    Path("texts/sub").mkdir(parents=True)
    Path("texts/a.txt").write_text("one\n")
    Path("texts/sub/b.txt").write_text("two\n")


def listed(directory: str = "texts") -> list[str]:
    return [str(path.relative_to(directory)) for path in list_files(Path(directory)).files]


def make_run(path: str) -> None:
    with new_run(path, Config(), ByteTokenizer()):
        Path(path, "metrics.jsonl").write_text("{}\n")


def make_draft(path: str) -> None:
    Path(path, ".new/checkpoints").mkdir(parents=True)
    Path(path, "tokenizer.json").write_text("{}")


def make_export(path: str) -> None:
    Path(path).mkdir()
    Path(path, "config.json").write_text("{}")
    Path(path, "model.safetensors").write_bytes(b"")
    Path(path, "README.md").write_text("a model")


def make_adapter(path: str) -> None:
    Path(path).mkdir()
    Path(path, "adapter_config.json").write_text("{}")
    Path(path, "adapter_model.safetensors").write_bytes(b"")


def make_prepared(path: str) -> None:
    Path("tokenizer.json").write_text(train_bpe([["text"]], 260).to_json())
    Path("source.txt").write_text("text")
    prepare(["source.txt"], Path(path), PrepareParams("tokenizer.json"))


OUTPUTS = [
    (make_run, "1 run"),
    (make_draft, "1 run"),
    (make_export, "1 exported model"),
    (make_adapter, "1 exported model"),
    (make_prepared, "1 directory of token ids"),
]


@pytest.mark.parametrize(("make", "note"), OUTPUTS)
def test_outputs_inside_a_directory_are_not_text(make: Callable[[str], None], note: str) -> None:
    before = read_path(Path("texts"))
    make("texts/sub/output")
    after = read_path(Path("texts"))
    assert after.sha256 == before.sha256
    assert after.source == f"{before.source}; skipped {note}"
    source = find_source("texts")
    assert [path.name for path in source.files] == ["a.txt", "b.txt"]
    assert source.skipped == note


def test_several_skipped_directories_are_named_in_the_plural() -> None:
    kinds = {"directory of token ids": 2, "exported model": 3, "run": 1}
    assert Listing((), kinds).note == "2 directories of token ids and 3 exported models and 1 run"


@pytest.mark.parametrize(("make", "note"), OUTPUTS)
def test_a_directory_of_records_may_hold_outputs(make: Callable[[str], None], note: str) -> None:
    Path("records").mkdir()
    Path("records/a.jsonl").write_text("{}\n")
    make("records/output")
    Path("records/output/loss.png").touch()
    assert holds_records(Path("records"))
    assert find_files(Path("records")).train == [Path("records/a.jsonl")]


@pytest.mark.parametrize("name", ["dataset_info.json", "dataset_infos.json"])
def test_a_description_of_a_data_set_is_no_record(name: str) -> None:
    """Repositories of the Hub have such a description as a file of a single line."""
    Path("records").mkdir()
    Path("records/a.jsonl").write_text("{}\n")
    Path("records", name).write_text('{"features": {"text": "string"}}')
    assert holds_records(Path("records"))
    assert find_files(Path("records")).train == [Path("records/a.jsonl")]


def test_a_directory_of_records_follows_links() -> None:
    for name in ("store/a.jsonl", "records/README.md", "mixed/b.jsonl"):
        Path(name).parent.mkdir()
        Path(name).touch()
    Path("records/data").symlink_to(Path("store").absolute())
    assert holds_records(Path("records"))
    Path("mixed/more").symlink_to(Path("texts").absolute())
    assert not holds_records(Path("mixed"))


@pytest.mark.parametrize("make", [make_export, make_prepared])
def test_an_output_itself_is_rejected(make: Callable[[str], None]) -> None:
    make("output")
    for read in (read_path, find_source):
        with pytest.raises(UserError, match="output holds no text"):
            read(Path("output") if read is read_path else "output")


def test_a_run_in_the_directory_of_its_own_text_hides_only_its_files() -> None:
    before = read_path(Path("texts"))
    make_run("texts")
    assert read_path(Path("texts")) == before
    assert not set(RUN_FILES) & set(listed())


def test_a_run_without_other_files_holds_no_text() -> None:
    make_run("run")
    with pytest.raises(UserError, match="no text files in run"):
        read_path(Path("run"))


def test_json_files_of_users_are_text() -> None:
    for name in ("config.json", "tokenizer.json", "index.json", "metrics.jsonl"):
        Path("texts", name).write_text(json.dumps({"kind": "of user"}))
    assert listed() == ["a.txt", "config.json", "index.json", "metrics.jsonl", "sub/b.txt", "tokenizer.json"]


@pytest.mark.parametrize(
    ("link", "target", "expected"),
    [
        ("texts/more", "elsewhere", ["a.txt", "more/c.txt", "sub/b.txt"]),
        ("texts/sub/up", "texts", ["a.txt", "sub/b.txt"]),  # loop
        ("texts/out", ".", ["a.txt", "sub/b.txt"]),  # a parent of the tree
        ("texts/again", "texts/sub", ["a.txt", "sub/b.txt"]),  # read anyway
        ("texts/d.txt", "texts/a.txt", ["a.txt", "d.txt", "sub/b.txt"]),
        ("texts/more", "texts/.store", ["a.txt", "more/e.txt", "sub/b.txt"]),
        ("texts/gone", "nowhere", ["a.txt", "sub/b.txt"]),
    ],
)
def test_links_are_followed_once(link: str, target: str, expected: list[str]) -> None:
    for name in ("elsewhere/c.txt", "texts/.store/e.txt"):
        Path(name).parent.mkdir()
        Path(name).write_text("three\n")
    Path(link).symlink_to(Path(target).absolute())
    assert listed() == expected


def test_a_link_into_a_run_is_followed() -> None:
    """The run is not read, so its subdirectory is read only through the link."""
    make_run("texts/run")
    Path("texts/run/notes").mkdir()
    Path("texts/run/notes/c.txt").write_text("three\n")
    Path("texts/more").symlink_to(Path("texts/run/notes").absolute())
    assert listed() == ["a.txt", "more/c.txt", "sub/b.txt"]


def test_a_loop_outside_the_tree_ends() -> None:
    Path("elsewhere/deep").mkdir(parents=True)
    Path("elsewhere/c.txt").write_text("three\n")
    Path("elsewhere/deep/loop").symlink_to(Path("elsewhere").absolute())
    for name in ("one", "two"):
        Path("texts", name).symlink_to(Path("elsewhere").absolute())
    assert listed() == ["a.txt", "one/c.txt", "sub/b.txt"]


@pytest.mark.parametrize("name", ["train.log", "sub/TRAIN.LOG", "nohup.out", "slurm-123.out", "slurm-123_4.err"])
def test_logs_beside_text_are_not_text(name: str) -> None:
    before = read_path(Path("texts"))
    Path("texts", name).write_text("step 1\n")
    after = read_path(Path("texts"))
    assert after.sha256 == before.sha256
    assert after.source == f"{before.source}; skipped 1 log"
    assert find_source("texts").skipped == "1 log"


def test_a_directory_of_logs_only_is_text() -> None:
    Path("logs").mkdir()
    for name in ("a.log", "b.log"):
        Path("logs", name).write_text(f"{name}\n")
    assert read_path(Path("logs")).text == "a.log\nb.log\n"


def test_logs_that_hold_most_of_the_text_are_text() -> None:
    Path("chats").mkdir()
    for name in ("2004.log", "2005.log"):
        Path("chats", name).write_text("hello\n" * 20)
    Path("chats/README.md").write_text("chats\n")
    assert read_path(Path("chats")).text == "hello\n" * 40 + "chats\n"


def test_a_log_that_is_larger_than_the_text_is_no_text() -> None:
    before = read_path(Path("texts"))
    Path("texts/train.log").write_text("step 1\n" * 1000)
    assert read_path(Path("texts")).sha256 == before.sha256


def test_a_log_that_is_named_is_text() -> None:
    Path("a.log").write_text("line\n")
    assert read_path(Path("a.log")).text == "line\n"


def test_a_log_beside_records_is_no_text() -> None:
    Path("records").mkdir()
    Path("records/a.jsonl").write_text("{}\n")
    Path("records/train.log").write_text("step 1\n")
    assert holds_records(Path("records"))
    assert find_files(Path("records")).train == [Path("records/a.jsonl")]


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_file_that_receives_the_output_of_the_command_is_not_text(stream: str) -> None:
    code = "from jaxgpt.data.text import read_path; from pathlib import Path; text = read_path(Path('texts'))"
    code += "; Path('found').write_text(text.text + text.source)"
    command = f'"$0" -c "$1" {stream}> texts/out.txt'
    subprocess.run(["sh", "-c", command, sys.executable, code], check=True)
    assert Path("found").read_text() == "one\ntwo\n2 text files in texts; skipped 1 output file"
