"""Fine-tuning on conversations, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import flags, jaxgpt
from test_chat import talker

from jaxgpt import load, save
from jaxgpt.checkpoint.run import Run
from jaxgpt.trainer.metrics import read_metrics

SETTINGS = flags(data__path="chats.jsonl", data__window=64, train__batch_size=4, optim__learning_rate=0.02)


@pytest.fixture(autouse=True)
def chats() -> None:
    """A base model, without an end of the turn in its files, and conversations; the last ten are held out and different."""
    save(talker(128, end=False), "base")
    lines = []
    for i in range(100):
        name = ("Ann", "Bob")[i % 2]
        talk = [("user", name), ("assistant", f"Hi {name}!"), ("user", "Bye"), ("assistant", "Bye!")]
        if i < 90:
            talk = talk[: 2 + i % 3]
        else:
            talk[2] = ("user", f"Bye {i}")
        messages = [{"role": role, "content": content} for role, content in talk]
        lines.append(json.dumps({"messages": messages}))
    Path("chats.jsonl").write_text("\n".join(lines) + "\n")


def finetune(out: str, *settings: str) -> str:
    result = jaxgpt("train", "finetune", "--init-from", "base", "--out", out, *SETTINGS, *settings)
    assert result.code == 0, result.err
    return result.out


@pytest.mark.ci
def test_a_fine_tuned_model_answers() -> None:
    out = finetune("tuned", *flags(train__steps=100, train__eval_every=100, train__steps_per_call=10, mesh__data=1))
    assert "100 conversations with 140 answers in chats.jsonl; loss on " in out
    assert "next      jaxgpt chat tuned" in out
    assert "--- a sample, after '<|im_start|>user\\nAnn<|im_end|>\\n<|im_start|>assistant\\n' ---" in out
    assert "\n--- the data continue with 'Hi Ann!<|im_end|>' ---\n" in out
    assert "train.prompt" not in out
    for name in ("Ann", "Bob"):
        answer = jaxgpt("chat", "tuned", "--once", name, "--temperature", "0", "--json").json
        assert (answer["answer"], answer["finish_reason"]) == (f"Hi {name}!", "stop")
    assert jaxgpt("eval", "tuned", "--data.path", "chats.jsonl", "--json").json["loss"] < 0.2


@pytest.mark.long
def test_a_run_does_not_depend_on_interruptions_and_devices() -> None:
    """Microbatches and devices have different numbers of counted tokens."""
    steps = flags(train__log_every=1, train__eval_every=3, optim__decay_steps=6)
    one = flags(mesh__data=1, train__steps=6)
    finetune("whole", *steps, *one)
    finetune("cut", *steps, *flags(mesh__data=1, train__steps=3))
    assert jaxgpt("train", "--resume", "--out", "cut", "--train.steps", "6").code == 0
    for a, b in zip(*(jax.tree.leaves(load(name).params) for name in ("whole", "cut")), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    finetune("split", *steps, *flags(mesh__data=2, train__accumulation=8, train__steps=6))
    whole, split = (
        [line["loss"] for line in read_metrics(Path(name) / "metrics.jsonl") if "loss" in line]
        for name in ("whole", "split")
    )
    assert len(whole) == 6
    np.testing.assert_allclose(split, whole, rtol=1e-5)


def test_bad_input_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are checked before weights are read."""
    monkeypatch.setattr("jaxgpt.trainer.loop.open_weights", lambda start: pytest.fail("weights were read"))
    good = Path("chats.jsonl").read_text().splitlines()
    for bad, said in (
        (good[6][:30], "chats.jsonl, line 7: not valid JSON ("),
        (
            good[6].replace('"messages"', '"text"'),
            "chats.jsonl, line 7: no known shape: the fields are ['text']; use one of",
        ),
        (good[6].replace('"Ann"', '{"type": "image"}'), "line 7: message 1 has a content that is neither"),
    ):
        Path("chats.jsonl").write_text("\n".join([*good[:6], bad, *good[7:]]))
        result = jaxgpt("train", "finetune", "--init-from", "base", "--out", "tuned", *SETTINGS)
        assert result.code == 2
        assert said in result.err
        assert result.err.endswith("; to skip such records, use --data.on-error skip\n")
        assert result.err.count("\n") == 1
        assert not Path("tuned").exists()


def test_conversations_of_other_commands() -> None:
    result = jaxgpt("train", "shakespeare", "--data.path", "chats.jsonl", "--out", "tuned")
    assert result.code == 2
    assert "chats.jsonl holds conversations, not text" in result.err
    result = jaxgpt("train", "shakespeare", "--data.path", "chats.jsonl", "--data.stride", "4")
    assert result.code == 2
    assert "data.stride 4 does not apply to" in result.err
    Path("page.jsonl").write_text("<!DOCTYPE html>\n")
    result = jaxgpt("train", "shakespeare", "--data.path", "page.jsonl", "--out", "tuned")
    assert result.code == 2
    assert "page.jsonl, line 1: not valid JSON" in result.err


def test_eval_checks_the_data_before_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.cli.eval_run.load", lambda *_: pytest.fail("weights were read"))
    Path("page.jsonl").write_text("<!DOCTYPE html>\n")
    result = jaxgpt("eval", "base", "--data.path", "page.jsonl")
    assert result.code == 2
    assert "page.jsonl, line 1: not valid JSON" in result.err


def test_eval_can_skip_records() -> None:
    lines = Path("chats.jsonl").read_text().splitlines()
    Path("good.jsonl").write_text("\n".join(lines))
    Path("bad.jsonl").write_text("\n".join(["bad", *lines]))
    result = jaxgpt("eval", "base", "--data.path", "bad.jsonl")
    assert result.code == 2
    assert result.err.endswith("to skip such records, use --data.on-error skip\n")
    skipping = jaxgpt("eval", "base", "--data.path", "bad.jsonl", "--data.on-error", "skip", "--json").json
    assert skipping["loss"] == jaxgpt("eval", "base", "--data.path", "good.jsonl", "--json").json["loss"]


def test_records_can_be_skipped() -> None:
    lines = Path("chats.jsonl").read_text().splitlines()
    lines[6] = lines[6][:30]
    Path("chats.jsonl").write_text("\n".join(lines))
    out = jaxgpt("data", "report", "base", "--data.path", "chats.jsonl", "--data.on-error", "skip").out
    assert "99 conversations with 139 answers in chats.jsonl; " in out
    assert "skipped 1 record: 1 unreadable (first: chats.jsonl, line 7: not valid JSON (" in out


QUICK = flags(train__steps=1, train__sample_tokens=0, mesh__data=1)
VARIABLES = '{"think": false}'


def tuned() -> None:
    """Fine-tune a run with variables of its chat template, and a token in its answers."""
    finetune("tuned", *QUICK, "--data.chat-template-kwargs", VARIABLES, "--data.answer-tokens", "<|im_start|>")


def tuned_again(*settings: str, target: str = "finetune") -> str:
    """Fine-tune the fine-tuned run; return the notes."""
    result = jaxgpt("train", target, "--init-from", "tuned", "--out", "again", *SETTINGS, *QUICK, *settings)
    assert result.code == 0, result.err
    return str(result.err)


def test_a_run_that_starts_from_a_fine_tuned_run_inherits_the_format_of_its_conversations() -> None:
    tuned()
    assert f"using data.chat_template_kwargs {VARIABLES} and data.answer_tokens <|im_start|>, as tuned" in tuned_again()
    data = Run(Path("again")).config().data
    assert (data.template_variables, data.answer_tokens) == ({"think": False}, ("<|im_start|>",))


def test_given_settings_of_conversations_are_not_inherited() -> None:
    tuned()
    notes = tuned_again("--data.chat-template-kwargs", "{}")
    assert "using data.answer_tokens <|im_start|>, as tuned" in notes
    data = Run(Path("again")).config().data
    assert (data.template_variables, data.answer_tokens) == ({}, ("<|im_start|>",))


def test_a_file_of_settings_inherits_what_it_does_not_set() -> None:
    tuned()
    Path("a.json").write_text('{"data": {"answer_tokens": []}}')
    tuned_again(target="a.json")
    data = Run(Path("again")).config().data
    assert (data.template_variables, data.answer_tokens) == ({"think": False}, ())


def test_a_repeated_run_keeps_its_own_format_of_conversations() -> None:
    tuned()
    tuned_again("--data.chat-template-kwargs", "{}")
    assert jaxgpt("train", "again", "--out", "third").code == 0
    assert Run(Path("third")).config().data.template_variables == {}
