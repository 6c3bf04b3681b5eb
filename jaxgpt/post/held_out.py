"""The held-out prompts of a run, and the answers of a model to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxgpt.config import Config
from jaxgpt.data import PromptSplit
from jaxgpt.data.prompts import Prompt
from jaxgpt.lm import LM
from jaxgpt.lm.results import Generation
from jaxgpt.post.answers import sample
from jaxgpt.trainer.evaluators import Watch
from jaxgpt.trainer.program import Program


def held_out_prompts(config: Config, watch: Watch) -> Sequence[Prompt]:
    """Return the validation prompts; before the last evaluation, only the first `train.eval_windows` (0: all).

    There is at least one prompt: without held-out prompts, the training prompts are evaluated (`data.open_data`).
    """
    assert watch.data is not None, "the data of the run"
    assert isinstance(watch.data.val, PromptSplit)
    prompts = watch.data.val.prompts
    if not watch.final and config.train.eval_windows:
        return prompts[: config.train.eval_windows]
    return prompts


def held_out_batches(config: Config, prompts: int) -> Iterator[slice]:
    """Yield the batches of a number of prompts: `train.eval_batch_size` rows each (0: the size of a rollout)."""
    size = config.train.eval_batch_size or config.rollout_answers
    for first in range(0, prompts, size):
        yield slice(first, first + size)


def answers_to(
    prompts: Sequence[Prompt], program: Program, params: Any, watch: Watch, key: jax.Array | None
) -> list[Generation] | None:
    """Answer prompts in the batches of `held_out_batches`; return None if interrupted.

    Each answer has at least one id, counting the id that ended it (`answer_ids`). `key` as for `sample`.
    """
    config = program.config
    assert watch.data is not None, "the data of the run"
    lm = LM(config, program.weights(params), watch.data.tokenizer)
    answers: list[Generation] = []
    for batch in held_out_batches(config, len(prompts)):
        if watch.interrupted():
            return None
        batch_key = None if key is None else jax.random.fold_in(key, batch.start)
        answers += sample(lm, prompts[batch], batch_key)
        watch.progress(len(answers), len(prompts))
    return answers
