"""Settings that have no effect, or not the expected one, are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import TEXT, flags, jaxgpt

TINY = flags(
    model__n_layer=1, model__n_head=1, model__n_embd=8, model__block_size=16, train__batch_size=2, train__eval_windows=1,
    train__sample_tokens=0, mesh__data=1, data__path="text.txt", train__steps=2,
)  # fmt: skip


@pytest.mark.parametrize("warmup", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_that_ends_within_the_warmup_says_so(warmup: int) -> None:
    Path("text.txt").write_text(TEXT)
    settings = flags(optim__warmup_steps=warmup, optim__learning_rate=0.003, train__prompt="\n")
    result = jaxgpt("train", "nanogpt-cpu", *TINY, *settings)
    assert result.code == 0, result.err
    notes = [line for line in result.err.splitlines() if "warmup" in line]
    expected = (
        "jaxgpt: training ends at step 2, within the 2 steps of learning-rate warmup: the rate reaches 0.002 of 0.003"
    )
    assert [note.split("; ")[0] for note in notes] == [expected] * (warmup == 2)
    assert "next     jaxgpt sample runs/nanogpt-cpu --prompt 722.\n" in result.out, "a new line cannot be typed"


def test_a_stride_for_conversations_is_rejected() -> None:
    result = jaxgpt("train", "shakespeare", "--data.path", "talks.jsonl", "--data.stride", "4")
    assert result.code == 2
    assert "data.stride 4 does not apply to conversations" in result.err
