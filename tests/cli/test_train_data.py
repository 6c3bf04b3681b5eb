"""Training ends with a sample and a summary for any data."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import flags, jaxgpt

from jaxgpt.config import Config, DataConfig
from jaxgpt.data.tokenizers.base import WordTokenizer
from jaxgpt.errors import UserError
from jaxgpt.trainer.resume import check_resume

TINY = flags(
    model__n_layer=1,
    model__n_head=1,
    model__n_embd=8,
    model__block_size=8,
    train__steps=1,
    train__batch_size=2,
    train__eval_windows=1,
    train__sample_tokens=5,
    mesh__data=1,
)


@pytest.mark.ci
def test_a_sample_or_plot_that_fails_does_not_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **settings: object) -> None:
        raise UserError("not enough memory") if settings else OSError("disk full")

    monkeypatch.setattr("jaxgpt.cli.final_sample.generate", fails)
    monkeypatch.setattr("jaxgpt.cli.run_printer.draw_run", fails)
    np.asarray(np.arange(200) % 9, "<u2").tofile("train.bin")
    result = jaxgpt(
        "train", "nanogpt-cpu", *TINY, *flags(data__path="train.bin", data__tokenizer="ids", model__vocab_size=9)
    )
    assert result.code == 0, result.err
    assert "jaxgpt: cannot sample: not enough memory" in result.err
    assert "jaxgpt: cannot draw runs/nanogpt-cpu/loss.png: disk full" in result.err
    assert "uniform baseline: ln 9 = 2.20" in result.out
    assert "next      jaxgpt sample" in result.out


@pytest.mark.ci
def test_documents_are_masked_at_end_ids() -> None:
    Path("tokenizer.json").write_text(WordTokenizer([*"abcd", "</s>"]).to_json())
    ids = np.append(np.random.default_rng(1).integers(0, 4, (40, 4)), np.full((40, 1), 4), 1)
    np.asarray(ids, "<u2").tofile("train.bin")
    data = flags(data__tokenizer="tokenizer.json", data__documents="mask", mesh__data=2, train__batch_size=3)
    more = flags(train__steps=3, train__steps_per_call=2, train__accumulation=3)
    result = jaxgpt("train", "nanogpt-cpu", *TINY, *data, *more, "--data.path", "train.bin", "--out", "r")
    assert result.code == 0, result.err
    result = jaxgpt("eval", "r", "--json")
    assert result.json["tokens"] == 13  # 2 windows of 8 inputs; 3 inputs are the end of a document
    np.asarray(np.arange(200) % 4, "<u2").tofile("none.bin")
    result = jaxgpt("train", "nanogpt-cpu", *TINY, *data, "--data.path", "none.bin")
    assert (result.code, "does not contain 4" in result.err) == (2, True), result.err


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["path", pytest.param("mix", marks=pytest.mark.long)])
def test_moved_data_is_named_at_a_resume(kind: str) -> None:
    """Data are compared by content, so they may move."""
    Path("a.txt").write_text("x y z <EOS> " * 60)
    given = lambda path: ["--data.path", path] if kind == "path" else ["--data.mix", f"{path}=2", "b.txt=1"]  # noqa: E731
    Path("b.txt").write_text("y z <EOS> " * 60)
    start = ["train", "nanogpt-cpu", *TINY, *given("a.txt"), *flags(data__tokenizer="word"), "--out", "out"]
    assert jaxgpt(*start).code == 0
    Path("a.txt").rename("c.txt")
    resume = ["train", "--resume", "--out", "out", "--train.steps", "3"]
    result = jaxgpt(*resume)
    assert (result.code, "Traceback" in result.err) == (2, False)
    assert "no such file or directory: a.txt" in result.err
    if kind == "path":
        Path("other.txt").write_text("z y <EOS> " * 60)
        result = jaxgpt(*resume, *given("other.txt"))
        assert (
            "the data of out has changed since step 1: other.txt (240 tokens then, 180 now); restore it, add the new data as a "
            "source" in result.err
        )
    result = jaxgpt(*resume, *given("c.txt"))
    assert result.code == 0, result.err
    assert f"data.{kind}" in result.err
    assert jaxgpt("eval", "out").code == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (DataConfig(path="a.txt"), DataConfig(path="b/a.txt"), ""),
        (DataConfig(path="a.txt"), DataConfig(path="a.jsonl"), "not --data.path a.jsonl: this run uses a.txt; "),
        (DataConfig(path="a.txt"), DataConfig(), "this run uses a.txt; "),
        (DataConfig(), DataConfig(dataset="shakespeare"), "this run uses the built-in text python; "),
        (
            DataConfig(mix=("a=1", "b=2")),
            DataConfig(path="a"),
            "not --data.path a: this run uses the mixture a=1 b=2; ",
        ),
        (DataConfig(mix=("a=1", "b=2")), DataConfig(mix=("c=1", "b=2.0")), ""),
        (DataConfig(mix=("a=1", "b=2")), DataConfig(mix=("b=2", "a=1")), ""),
        (DataConfig(mix=("a=1", "b=2")), DataConfig(mix=("a=1",)), ""),
        (DataConfig(path="a.txt"), DataConfig(mix=("a.txt=1", "b=1")), ""),
        (
            DataConfig(path="a.txt"),
            DataConfig(path="a.txt", tokenizer="byte"),
            "keeps the tokenizer char, not --data.tok",
        ),
        (
            DataConfig(path="a.txt"),
            DataConfig(path="b.txt", train_fraction=0.5),
            "keeps data.train_fraction: 0.9",
        ),
    ],
)
def test_paths_of_data_may_change_at_a_resume_and_nothing_else(old: DataConfig, new: DataConfig, message: str) -> None:
    before, after = (replace(Config(), data=data) for data in (old, new))
    with pytest.raises(UserError, match=re.escape(message)) if message else nullcontext():
        check_resume(before, after)


def test_a_resumed_run_keeps_its_state_and_its_validation_windows() -> None:
    """With different windows, `best` would compare losses on different data."""
    for name, value in {
        "train.eval_windows": 7,
        "optim.name": "muon",
        "optim.ema_decay": 0.9,
        "model.n_layer": 9,
    }.items():
        with pytest.raises(UserError, match=f"a resumed run keeps {name}: "):
            check_resume(Config(), Config().with_settings({name: value}))


@pytest.mark.ci
def test_a_mixture_of_packed_documents() -> None:
    Path("a.txt").write_text("x y z <EOS> " * 60)
    Path("b.txt").write_text("y z <EOS> " * 60)
    data = ["--data.mix", "a.txt=2", "b.txt=1", *flags(data__tokenizer="word", data__documents="pack")]
    result = jaxgpt("train", "nanogpt-cpu", *TINY, *data, "--out", "out")
    assert result.code == 0, result.err
    assert "data     66.7% a.txt; 54 documents, windows 75.0% full; 33.3% b.txt; 54 documents, windows" in result.out
    Path("b.txt").write_text("z y <EOS> " * 60)
    result = jaxgpt("train", "--resume", "--out", "out", "--train.steps", "3")
    assert "the data of out has changed since step 1: b.txt; 54 documents" in result.err
