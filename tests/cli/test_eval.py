"""jaxgpt eval: every token counts once, for any text and machine."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import SMALL, TEXT, run_folder
from helpers import jaxgpt

import jaxgpt as package
from jaxgpt.data.tokenizers.base import CharTokenizer, WordTokenizer
from jaxgpt.lm import load
from jaxgpt.train.loss import cross_entropy

T = SMALL.block_size


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    return run_folder(tmp_path / "run", SMALL)


def change(run: Path, section: str, **values: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config[section] |= values
    (run / "config.json").write_text(json.dumps(config))


def evaluate(run: Path, *args: str) -> dict[str, Any]:
    result = jaxgpt("eval", str(run), *args, "--json")
    assert result.code == 0, result.err
    values: dict[str, Any] = result.json
    return values


def test_every_token_counts_once_for_any_stride(run: Path) -> None:
    change(run, "data", path="text.txt", train_fraction=0.5)
    found = []
    for stride in (0, 1, T):
        change(run, "data", stride=stride)
        found.append(evaluate(run))
    assert found[0] == found[1] == found[2]
    n = len(TEXT) * 10
    assert found[0]["windows"] == (n - 1) // T
    assert found[0]["tokens"] == (n - 1) // T * T
    assert found[0]["bits_per_byte"] == pytest.approx(found[0]["loss"] / math.log(2), rel=1e-6), "a byte is a character"


@pytest.mark.ci
def test_a_text_shorter_than_a_window(run: Path) -> None:
    lm = load(run)
    ids = jnp.asarray(lm.tokenizer.encode(TEXT[:T]))[None]
    logits = jax.jit(package.GPT(lm.config.model).apply)({"params": lm.params}, ids[:, :-1])
    losses = cross_entropy(logits, ids[:, 1:])[0]
    for n in (2, 9, T):
        Path("short.txt").write_text(TEXT[:n])
        found = evaluate(run, "--data.path", "short.txt")
        assert (found["tokens"], found["windows"]) == (n - 1, 1)
        assert "stderr" not in found
        assert found["loss"] == pytest.approx(float(losses[: n - 1].mean()), rel=1e-5)
    out = jaxgpt("eval", str(run), "--data.path", "short.txt").out
    assert "nan" not in out
    assert f"{T - 1} in 1 window of {T}" in out


def test_a_text_without_a_token_to_predict(run: Path) -> None:
    Path("short.txt").write_text("T")
    result = jaxgpt("eval", str(run), "--data.path", "short.txt")
    assert result.code == 2
    assert "too few tokens for evaluation: 1 in " in result.err


def test_bits_per_byte_count_the_bytes_of_the_text(run: Path) -> None:
    """A character may have several bytes."""
    Path("text.txt").write_text(TEXT.replace("t", "\u00fc") * 20)
    characters = sorted({*TEXT, "\u00fc"} - {"t"})
    vocab = load(run).config.model.vocab_size
    filler = (chr(0x4E00 + n) for n in range(vocab - len(characters)))
    (run / "tokenizer.json").write_text(CharTokenizer([*characters, *filler]).to_json())
    for fraction in (1.0, 0.55):
        change(run, "data", path="text.txt", train_fraction=fraction)
        found = evaluate(run)
        text = Path("text.txt").read_text()
        text = text[int(fraction * len(text)) % len(text) :]
        bits = found["loss"] / math.log(2)
        assert found["bits_per_byte"] == pytest.approx(bits * len(text) / len(text.encode()), rel=1e-6)


PAIRS = "".join(json.dumps({"prompt": "To be", "completion": " or not"}) + "\n" for _ in range(3))


@pytest.mark.parametrize(("name", "kind"), [("pairs.jsonl", "conversations"), ("ids.bin", "token ids")])
@pytest.mark.parametrize("rule", ["yes", "no"])
@pytest.mark.parametrize("is_given", [True, False])
def test_the_rule_of_windows_is_rejected_where_it_has_no_effect(
    run: Path, name: str, kind: str, rule: str, is_given: bool
) -> None:
    Path("pairs.jsonl").write_text(PAIRS)
    (np.arange(400) % 15).astype("<u2").tofile("ids.bin")
    if not is_given:
        change(run, "data", path=name)
    path = ["--data.path", name] if is_given else []
    result = jaxgpt("eval", str(run), *path, "--data.bos", rule)
    assert result.code == 2
    assert f"--data.bos {rule} applies only to windows of a text, but {name} holds {kind}: omit it" in result.err


def test_the_rule_of_the_tokenizer_may_be_given_for_pairs(run: Path) -> None:
    Path("pairs.jsonl").write_text(PAIRS)
    assert evaluate(run, "--data.path", "pairs.jsonl", "--data.bos", "auto") == evaluate(
        run, "--data.path", "pairs.jsonl"
    )


def test_token_files(run: Path, tmp_path: Path) -> None:
    """A directory's validation files are used and reported; word ids have no bytes."""
    ids = np.arange(400) % 15
    folder = tmp_path / "tokens"
    folder.mkdir()
    ids.astype("<u2").tofile(folder / "train.bin")
    ids[:100].astype("<u2").tofile(folder / "val.bin")
    found = evaluate(run, "--data.path", str(folder))
    assert found["text"] == f"2 token files at {folder} (validation split)"
    assert found["tokens"] == 99 // T * T
    assert "bits_per_byte" in found
    assert "(all)" in evaluate(run, "--data.path", str(folder / "train.bin"))["text"]
    vocab = load(run).config.model.vocab_size
    (run / "tokenizer.json").write_text(WordTokenizer(map(str, range(vocab))).to_json())
    assert "bits_per_byte" not in evaluate(run, "--data.path", str(folder))
    assert "bits" not in jaxgpt("eval", str(run), "--data.path", str(folder)).out


def test_a_run_with_a_mesh_and_kernel_of_another_machine(run: Path) -> None:
    here = evaluate(run, "--data.path", "text.txt")
    assert here["model"] == f"{run}, step 0"
    change(run, "mesh", data=4, fsdp=4, tensor=2)
    change(run, "train", attention="cudnn", remat="offload")
    assert evaluate(run, "--data.path", "text.txt")["loss"] == pytest.approx(here["loss"], rel=1e-5)
    result = jaxgpt("eval", str(run), "--data.path", "text.txt")
    assert [line.split()[0] for line in result.out.splitlines()[:4]] == ["model", "text", "loss", "+-"]


def test_the_change_by_lower_precision_has_the_error_of_a_paired_comparison(run: Path) -> None:
    found = evaluate(run, "--data.path", "text.txt", "--weights", "int8")
    assert found["loss_float32"] == evaluate(run, "--data.path", "text.txt")["loss"]
    assert found["loss_change"] == found["loss"] - found["loss_float32"] != 0
    assert 0 < found["loss_change_stderr"] < found["stderr"]
    line = f"int8           changes the loss by {found['loss_change']:+.5f} +- {found['loss_change_stderr']:.5f}, from "
    assert line in jaxgpt("eval", str(run), "--data.path", "text.txt", "--weights", "int8").out
    Path("short.txt").write_text(TEXT[:T])
    assert "loss_change_stderr" not in evaluate(run, "--data.path", "short.txt", "--weights", "int8")
    [line] = re.findall("changes.*", jaxgpt("eval", str(run), "--data.path", "short.txt", "--weights", "int8").out)
    assert "+-" not in line
    assert "nan" not in line
