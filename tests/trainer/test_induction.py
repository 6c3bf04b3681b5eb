"""The preset `induction` learns induction heads, which `study` finds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from helpers import jaxgpt as command

import jaxgpt
from jaxgpt import study

pytestmark = pytest.mark.long


def test_the_loss_drops_when_an_induction_head_forms() -> None:
    """The recorded run takes 50 seconds of CPU time. The head is in the second layer, and absent before the drop."""
    assert command("train", "induction", "--out", "run").code == 0
    scores, losses = [], []
    for step in (250, 500, 1000):
        lm = jaxgpt.load("run", step)
        ids = study.repeated_tokens(lm, period=25, rows=32)
        scores.append(study.heads(lm, ids))
        logits = np.asarray(study.run(lm, ids).logits)[:, 25:-1]  # logits of the second copy
        picked = np.take_along_axis(logits, np.asarray(ids)[:, 26:, None], -1)[..., 0]
        losses.append(float((np.log(np.exp(logits).sum(-1)) - picked).mean()))
    assert scores[0].induction.max() < 0.1
    assert scores[2].induction[1].max() > 0.4
    assert scores[2].induction[0].max() < 0.1
    assert scores[2].previous[0].max() > 0.2
    assert all(after < before for before, after in pairwise(losses))
    assert losses[2] < losses[0] - 1
