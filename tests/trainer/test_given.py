"""Parts of a run that are given in Python: a resume without them is rejected, and with them it continues."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TEXT, jaxgpt, small_run

from jaxgpt.checkpoint.index import checkpoints, resolve_step
from jaxgpt.checkpoint.info import read_info, seal
from jaxgpt.checkpoint.run import Run
from jaxgpt.errors import UserError
from jaxgpt.lm import load, save
from jaxgpt.model import GPT
from jaxgpt.model.attention import Attention
from jaxgpt.model.gpt import Block
from jaxgpt.model.params import count_parameters
from jaxgpt.train.loss import RowSums, next_token_loss
from jaxgpt.trainer.build import build
from jaxgpt.trainer.evaluation import ValidationLoss
from jaxgpt.trainer.evaluators import Measured
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.feed import DataFeed, Feed
from jaxgpt.trainer.frozen_sources import FrozenArrays, FrozenWeights
from jaxgpt.trainer.given import ranking_of
from jaxgpt.trainer.loop import Outcome, Start, train
from jaxgpt.trainer.weights import InitialWeights


class Notes(Listener):
    def __init__(self) -> None:
        self.lines = list[str]()

    def note(self, text: str) -> None:
        self.lines.append(text)


class TwiceAttention(Attention):
    """Multiplies the result of the attention: other logits with the same weights."""

    def __call__(self, x_BTD: Any, *args: Any, **options: Any) -> Any:
        out_BTD, kv = super().__call__(x_BTD, *args, **options)
        return 2 * out_BTD, kv


class TwiceBlock(Block):
    attention = TwiceAttention


class TwiceGPT(GPT):
    block = TwiceBlock


class GainAttention(Attention):
    """Multiplies the result of the attention by a trained vector."""

    @nn.compact
    def __call__(self, x_BTD: Any, *args: Any, **options: Any) -> Any:
        gain_D = self.weight("gain", nn.initializers.ones, (self.config.n_embd,), ("embed",))
        out_BTD, kv = super().__call__(x_BTD, *args, **options)
        return out_BTD * gain_D.reshape(1, 1, -1), kv


class GainBlock(Block):
    attention = GainAttention


class GainGPT(GPT):
    block = GainBlock


class OwnFeed(DataFeed):
    pass


def twice(model: GPT) -> Any:
    """Return an objective, twice the loss."""
    loss = next_token_loss(model.apply)

    def objective(params: Any, batch: Any, key: Any, frozen: Any) -> RowSums:
        sums = loss(params, batch, key, frozen)
        return sums._replace(loss_B=2 * sums.loss_B)

    return objective


def tree_norm(program: Any, params: Any, watch: Any) -> Measured:
    """An evaluator that prefers early checkpoints."""
    return Measured({"norm": 1.0 + watch.step}, 1.0 + watch.step)


CONFIG = small_run(steps=4, eval_every=2)
MODEL = TwiceGPT(CONFIG.with_model(vocab_size=25).model)
PARTS: dict[str, dict[str, Any]] = {
    "objective": {"build": partial(build, objective_of=twice)},
    "optimizer": {"build": partial(build, optimizer=optax.adam(1e-3))},
    "model TwiceGPT": {"build": partial(build, model=MODEL)},
    "frozen": {"frozen": {"x": jnp.ones(3)}},
    "feed OwnFeed": {"feed": OwnFeed},
    "evaluators tree_norm": {"evaluators": (tree_norm,)},
}


def started(until: int | None = 2, **parts: Any) -> Outcome:
    Path("text.txt").write_text(TEXT)
    config = CONFIG.with_model(vocab_size=25) if "build" in parts else CONFIG
    return train(Start(config, "out", **parts), Listener(), until)


def resumed(**parts: Any) -> tuple[Outcome, list[str]]:
    notes = Notes()
    return train(Start(Run("out").config(), run="out", **parts), notes), notes.lines


def make_older() -> None:
    """Make the checkpoint one of an older version, without a record of parts given in Python."""
    path = Path("out/checkpoints/2")
    info = read_info(path)
    seal(path, replace(info, about={name: value for name, value in info.about.items() if name != "given"}))


@pytest.mark.parametrize("name", PARTS)
def test_a_resume_without_a_part_given_in_python_is_one_line_and_changes_nothing(name: str) -> None:
    started(**PARTS[name])
    metrics = Path("out/metrics.jsonl").read_bytes()
    result = jaxgpt("train", "--resume", "--out", "out")
    argument = name.split()[0]
    assert result.code == 2
    *_, line = result.err.splitlines()
    assert f"out was trained with parts given in Python ({name}), which settings cannot specify" in line
    assert f"{argument}=..." in line
    assert Path("out/metrics.jsonl").read_bytes() == metrics
    assert list(checkpoints(Path("out/checkpoints"))) == [2]


def test_a_resume_with_the_parts_given_in_python_continues() -> None:
    of_build = partial(build, model=MODEL, objective=twice(MODEL), optimizer=optax.adam(1e-3))
    parts = {"build": of_build, **PARTS["frozen"], **PARTS["feed OwnFeed"], **PARTS["evaluators tree_norm"]}
    started(**parts)
    outcome, _ = resumed(**parts)
    assert outcome.step == 4


@pytest.mark.parametrize(
    ("feed", "missing"),
    [
        pytest.param(type("Texts", (), {"at": None}), "spec, reads_state, interrupted", id="no Feed"),
        pytest.param(type("Texts", (Feed,), {"at": None}), "spec", id="no spec"),
    ],
)
def test_a_feed_without_an_attribute_is_one_line(feed: Any, missing: str) -> None:
    with pytest.raises(
        UserError, match=f"the feed Texts has no {missing}: inherit from jaxgpt.trainer.feed.Feed, define at"
    ):
        started(feed=lambda *_: feed())


def test_a_feed_with_all_attributes_need_not_inherit_from_feed() -> None:
    def feed(program: Any, data: Any, last: Any) -> Any:
        own = DataFeed(program, data, last)
        return SimpleNamespace(at=own.at, spec=own.spec, reads_state=False, interrupted=False)

    assert started(feed=feed).step == 2


def test_a_plain_gpt_is_the_model_of_the_settings() -> None:
    plain = GPT(CONFIG.with_model(vocab_size=25).model)
    started(build=partial(build, model=plain))
    assert jaxgpt("train", "--resume", "--out", "out").code == 0


def test_a_different_ranking_keeps_the_best_checkpoint_and_starts_a_new_search() -> None:
    started(until=None, **PARTS["evaluators tree_norm"])
    directory = Path("out/checkpoints")
    assert resolve_step(directory, "best") == 2
    config = Run("out").config().with_settings({"train.steps": 6, "train.keep_last": 1})
    notes = Notes()
    train(Start(config, run="out", evaluators=(ValidationLoss(),)), notes)
    assert any("ranked by the evaluator of the settings, before step 4 by tree_norm" in line for line in notes.lines)
    assert list(checkpoints(directory)) == [2, 6]
    assert resolve_step(directory, "best") == 6


def test_a_run_of_an_older_version_without_the_record_resumes_as_before() -> None:
    started(**PARTS["evaluators tree_norm"])
    make_older()
    assert jaxgpt("train", "--resume", "--out", "out").code == 0
    assert resolve_step(Path("out/checkpoints"), "best") == 2


def test_frozen_arrays_of_an_older_version_are_named() -> None:
    started(**PARTS["frozen"])
    make_older()
    with pytest.raises(UserError, match=r"parts given in Python \(frozen\).*frozen=\.\.\.\)$"):
        resumed()


def test_info_names_a_ranking_given_in_python() -> None:
    outcome = started(**PARTS["evaluators tree_norm"])
    assert "step 2: tree_norm 3.0000 (best)" in jaxgpt("info", "out").out
    assert repr(outcome) == "<Outcome: stopped at step 2, evaluation norm 3>"


# Runs of a subclass of GPT.


def test_weights_of_a_subclass_need_its_class_and_commands_reject_them() -> None:
    started(**PARTS["model TwiceGPT"])
    message = "out was trained with the model TwiceGPT, given in Python: pass load(path, model=TwiceGPT)"
    with pytest.raises(UserError) as error:
        load("out")
    assert str(error.value).startswith(message)
    assert load("out", model=TwiceGPT).model is TwiceGPT
    for command in (["sample", "out"], ["train", "finetune", "--init-from", "out", "--data.path", "text.txt"]):
        result = jaxgpt(*command)
        assert result.code == 2
        assert message in result.err
    assert (
        "the model TwiceGPT, given in Python: plan it in Python" in jaxgpt("plan", "out", "--topology", "v5e:2x2").err
    )


def test_a_saved_model_of_a_subclass_needs_its_class() -> None:
    started(**PARTS["model TwiceGPT"])
    save(load("out", model=TwiceGPT), "saved")
    with pytest.raises(UserError, match="saved was trained with the model TwiceGPT"):
        load("saved")


def test_weights_that_gpt_lacks_are_named_and_counted() -> None:
    model = GainGPT(CONFIG.with_model(vocab_size=25).model)
    started(build=partial(build, model=model))
    info = jaxgpt("info", "out", "--json").json
    assert info["parameters"] == count_parameters(model)
    assert info["modules"]["h_0/attn"] > 0
    assert "flops_per_token" not in info
    make_older()
    with pytest.raises(
        UserError, match=r"out has weights that GPT lacks \(h_0/attn/gain\): load it in Python with the class"
    ):
        load("out")


def test_weights_that_a_subclass_needs_are_named() -> None:
    started()
    with pytest.raises(
        UserError, match=r"out lacks weights of GainGPT \(h_0/attn/gain\): load it in Python with the class"
    ):
        load("out", model=GainGPT)


def test_a_run_of_a_subclass_of_an_older_version_needs_its_class_to_resume() -> None:
    """Older versions recorded no class: the weights of the checkpoint show it."""
    model = GainGPT(CONFIG.with_model(vocab_size=25).model)
    started(build=partial(build, model=model))
    make_older()
    with pytest.raises(
        UserError, match=r"out has weights that GPT lacks \(h_0/attn/gain\): resume it in Python with the class"
    ):
        resumed()
    outcome, _ = resumed(build=partial(build, model=model))
    assert outcome.step == 4


def test_processes_compare_the_arrays_and_the_base_of_adapters() -> None:
    """Arrays of an objective next to the base of adapters are facts of their own."""
    base = FrozenWeights(cast(Any, SimpleNamespace(digest="of the base")), None)
    arrays = FrozenArrays(np.ones(2), checksum="of the arrays")
    weights = InitialWeights(has_adapters=True, base=base, frozen=arrays)
    assert weights.facts() == {"the reference": "of the arrays", "the frozen weights": "of the base"}


def test_a_first_evaluator_named_like_a_ranking_of_the_settings_is_given_in_python() -> None:
    def loss(program: Any, params: Any, watch: Any) -> Measured:
        return Measured({"mine": 1.0}, 1.0)

    assert ranking_of(loss, CONFIG) == "loss"
    assert ranking_of(ValidationLoss(), CONFIG) == ""
