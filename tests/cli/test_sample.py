"""`jaxgpt sample`, `explain` and `eval --weights` on a run of two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

import jaxgpt
from jaxgpt.cli import main
from jaxgpt.errors import UserError

TEXT = "abcdefgh ijklmnop\n" * 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text(TEXT)
    settings = {
        "data.path": folder / "text.txt", "model.n-layer": 1, "model.n-embd": 16, "model.n-head": 2, "model.block-size": 32,
        "train.steps": 2, "train.batch-size": 8, "train.sample-tokens": 0, "mesh.data": 1,
        "optim.name": "adamw", "model.positions": "learned",
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    # optax needs type promotion, unlike the tested code.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert main(["train", "shakespeare", "--out", str(folder / "run"), *flags]) == 0
    return str(folder / "run")


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    capsys.readouterr()
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_samples_as_text_and_as_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("sample", run, "--prompt", "abc", "--max-new-tokens", "12", "--num-return-sequences", "2")
    told = ask(capsys, *flags)
    assert [len(sample["ids"]) for sample in told["samples"]] == [12, 12]
    assert told["model"] == f"{run}, step 2"
    assert main(list(flags)) == 0
    texts = ["abc" + sample["text"] for sample in told["samples"]]
    assert capsys.readouterr().out == "\n---\n".join(texts) + "\n"


def test_streamed_text_equals_the_sample(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("sample", run, "--prompt", "abc", "--max-new-tokens", "12", "--stop", "mmm", "ppp")
    text = ask(capsys, *flags[:-3])["samples"][0]["text"]
    assert main([*flags, "--stream"]) == 0
    assert capsys.readouterr().out == f"abc{text}\n"


def test_a_prompt_without_a_text_starts_a_new_text(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("sample", run, "--max-new-tokens", "3")
    assert ask(capsys, *flags, "--prompt")["samples"] == ask(capsys, *flags)["samples"]
    assert main([*flags, "--prompt", "--stream"]) == 0


def test_beams(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-beams", "3", "--num-return-sequences", "2", "--early-stopping", "never", "--max-length", "20")
    samples = ask(capsys, "sample", run, "--prompt", "abc", *flags)["samples"]
    assert samples[0]["score"] > samples[1]["score"]
    assert len(samples[0]["ids"]) == 17


@pytest.mark.ci
def test_explain_names_the_token_that_sample_takes(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt", "abc", "--seed", "5", "--top-k", "4", "--top-p", "0.9")
    told = ask(capsys, "explain", run, *flags)
    [sample] = ask(capsys, "sample", run, *flags, "--max-new-tokens", "1")["samples"]
    assert told["token"]["id"] == sample["ids"][0]
    assert told["total"] == pytest.approx(1)
    assert [stage["name"] for stage in told["stages"]] == ["temperature 0.8", "top-k 4", "top-p 0.9"]
    assert main(["explain", run, *flags]) == 0
    assert f"random number  {told['uniform']:.8f}\n" in capsys.readouterr().out


def test_several_prompts(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    samples = ask(capsys, "sample", run, "--prompt", "abc", "de", "--max-new-tokens", "3")["samples"]
    assert [sample["prompt"] for sample in samples] == ["abc", "de"]


def test_python_and_the_command_line_give_the_same_sample(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    [sample] = ask(capsys, "sample", run, "--prompt", "abc")["samples"]
    [out] = jaxgpt.generate(jaxgpt.load(run, weights="float32"), "abc")
    assert sample == {"prompt": "abc"} | out._asdict()
    assert len(out.ids) == 29  # the remainder of the context


def test_load_takes_any_integer_and_checks_its_arguments(run: str) -> None:
    plain = jaxgpt.load(run).params
    for checkpoint in ("last", "2", 2, np.int64(2)):
        chex.assert_trees_all_equal(jaxgpt.load(run, checkpoint).params, plain)
    for checkpoint in (True, 2.0, None, -1):
        with pytest.raises(UserError, match=r"checkpoint .* must be"):
            jaxgpt.load(run, checkpoint)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no checkpoint '3'"):
        jaxgpt.load(run, 3)
    for weights in ("int4", "uint8", 8):
        with pytest.raises(UserError, match=r"weights .* is not supported: use one of float32, bfloat16, int8"):
            jaxgpt.load(run, weights=weights)  # type: ignore[arg-type]


def test_memorized_spans(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Test the output; tests/report/test_memorized.py tests the spans."""
    flags = ("sample", run, "--prompt", "abc", "--max-new-tokens", "12", "--check-memorized")
    told = ask(capsys, *flags)
    [sample] = told["samples"]
    span = sample["memorized"]
    assert (span["of"], len(span["text"])) == (12, span["characters"])
    assert span["text"] in sample["text"]
    assert told["validation_tokens"] == 12, "every line of the text is the same"
    assert main([*flags, "--stream"]) == 0
    printed = capsys.readouterr().out
    assert "\n---\nlongest span of sample 1 in the training data: " in printed
    assert f" of 12 tokens, {span['characters']} characters, at " in printed
    assert "text.txt:1\n" in printed


def test_memorized_spans_need_the_training_data(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(jaxgpt.load(run).config.data.path)
    text.write_text(TEXT.replace("ab", "ba"))
    try:
        assert main(["sample", run, "--check-memorized"]) == 2
        assert "has changed since step 2" in capsys.readouterr().err
    finally:
        text.write_text(TEXT)
