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
from jaxgpt.trainer.metrics import read_metrics

SETTINGS = flags(data__path="chats.jsonl", data__window=64, train__batch_size=4, optim__learning_rate=0.02)


@pytest.fixture(autouse=True)
def chats() -> None:
    """A base model, without an end of the turn in its files, and conversations of one and two turns."""
    save(talker(128, end=False), "base")
    lines = []
    for i in range(100):
        name = ("Ann", "Bob")[i % 2]
        talk = [("user", name), ("assistant", f"Hi {name}!"), ("user", "Bye"), ("assistant", "Bye!")]
        messages = [{"role": role, "content": content} for role, content in talk[: 2 + i % 3]]
        lines.append(json.dumps({"messages": messages}))
    Path("chats.jsonl").write_text("\n".join(lines) + "\n")


def finetune(out: str, *settings: str) -> str:
    result = jaxgpt("train", "finetune", "--init-from", "base", "--out", out, *SETTINGS, *settings)
    assert result.code == 0, result.err
    return result.out


@pytest.mark.ci
def test_a_fine_tuned_model_answers() -> None:
    out = finetune("tuned", *flags(train__steps=100, train__eval_every=100, train__steps_per_call=10, mesh__data=1))
    assert "100 conversations in chats.jsonl; loss on " in out
    assert "next      jaxgpt chat tuned" in out
    assert "--- a sample, after '<|im_start|>user\\nAnn<|im_end|>\\n<|im_start|>assistant\\n' ---" in out
    assert "train.prompt" not in out
    for name in ("Ann", "Bob"):
        answer = jaxgpt("chat", "tuned", "--once", name, "--temperature", "0", "--json").json
        assert (answer["answer"], answer["finish_reason"]) == (f"Hi {name}!", "stop")
    assert jaxgpt("eval", "tuned", "--json").json["loss"] < 0.2


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


def test_bad_input_leaves_nothing_behind() -> None:
    lines = Path("chats.jsonl").read_text().splitlines()
    Path("chats.jsonl").write_text("\n".join([*lines[:6], lines[6].replace('"content"', '"text"', 1)]))
    result = jaxgpt("train", "finetune", "--init-from", "base", "--out", "tuned", *SETTINGS)
    assert result.code == 2
    assert "chats.jsonl, line 7: message 1 needs a content" in result.err
    assert not Path("tuned").exists()
    result = jaxgpt("train", "shakespeare", "--data.path", "chats.jsonl", "--out", "tuned")
    assert result.code == 2
    assert "chats.jsonl holds conversations, not text" in result.err
    result = jaxgpt("train", "shakespeare", "--data.path", "chats.jsonl", "--data.stride", "4")
    assert result.code == 2
    assert "data.stride 4 does not apply to" in result.err
