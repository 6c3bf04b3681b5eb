"""Losses, gradients and metrics equal TRL's, which trl_values.py recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from tokenizers import Tokenizer as Library

from jaxgpt.config import Config, DataConfig, ModelConfig, PostConfig
from jaxgpt.convert.llama import LLAMA
from jaxgpt.convert.tensor_layout import to_leaves, to_tensor
from jaxgpt.convert.tensors import expand, leaf_shapes, tensor_shape
from jaxgpt.data.chat.formats import Formats
from jaxgpt.data.preference_records import read_preference
from jaxgpt.data.preferences import Preferences, encode_preference
from jaxgpt.data.prompts import Prompt
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.lm.results import Generation
from jaxgpt.model import GPT
from jaxgpt.post.answers import reward_answers
from jaxgpt.post.policy import VARIANTS, advantages, policy_objective
from jaxgpt.post.preference import preference_objective
from jaxgpt.post.rewards import Rewards
from jaxgpt.post.rollout_batch import rollout_batch, token_weights
from jaxgpt.train.loss import Objective, RowSums
from jaxgpt.train.step import gradient_sums, mean_gradients

RECORDED = json.loads(Path(__file__).with_name("trl_values.json").read_text())
MODEL = ModelConfig(
    vocab_size=32,
    block_size=32,
    n_layer=1,
    n_head=2,
    n_embd=8,
    n_inner=12,
    positions="rope",
    norm="rmsnorm",
    mlp="gated",
    activation="silu",
    bias=False,
    tie_embeddings=False,
)
EOS = 1
ROWS = sorted(expand(LLAMA.form.table, MODEL), key=lambda row: row.name)
SETTINGS = {
    "dpo": {},
    "robust": {"objective": "robust", "label_smoothing": 0.2},
    "ipo": {"objective": "ipo"},
    "normalized": {"normalize": True},
    "sft": {},
}
SFT = 0.5  # weight of the cross entropy of "sft"


POLICIES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "kl": {"kl": 0.05},
    "dr_grpo": {"objective": "dr-grpo", "max_new_tokens": 8},
    "dapo": {"objective": "dapo", "kl": 0.02, "clip_high": 0.28},
    "gspo": {"objective": "gspo", "clip_low": 0.03, "clip_high": 0.04},
    "rloo": {"objective": "rloo"},
}


def sines(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the weights of trl_values.py."""
    values = np.sin(np.arange(np.prod(shape)) * 1.7 + seed, dtype=np.float64)
    return (1 + 0.1 * values if len(shape) == 1 else 0.5 * values).astype(np.float32).reshape(shape)


def weights(seed: int) -> Any:
    shapes = leaf_shapes(MODEL)
    leaves = {}
    for number, row in enumerate(ROWS):
        leaves |= to_leaves(row, sines(tensor_shape(row, shapes), seed + number), shapes)
    return unflatten_dict({tuple(path.split("/")): leaf for path, leaf in leaves.items()})


def projections(array: np.ndarray) -> list[float]:
    """Return the numbers that trl_values.py records of a gradient."""
    flat = np.asarray(array, np.float64).reshape(-1)
    index = np.arange(len(flat))
    return [float(np.linalg.norm(flat)), float(flat @ np.sin(index)), float(flat @ np.cos(0.7 * index))]


def pairs() -> Preferences:
    library = Library.from_str(RECORDED["tokenizer"])
    library.add_special_tokens(["<eos>"])
    tokenizer = SubwordTokenizer(library)
    tokenizer.special = SpecialTokens({"eos_token_id": 1}, {})
    records = [read_preference(record) for record in RECORDED["records"]]
    return Preferences([encode_preference(record, tokenizer, Formats(None, None)) for record in records])


def check(
    objective: Any, batch: Any, frozen: Any, expected: dict[str, Any], metrics: dict[str, str], accumulation: int = 1
) -> None:
    """Compare the loss, the gradients and the metrics of an objective; with microbatches, the last rows are padding."""
    params = weights(0)
    if accumulation > 1:
        batch = jax.tree.map(lambda x: np.concatenate([x, np.full_like(x, -1)]), batch)
    sums_of = partial(gradient_sums, objective=objective, accumulation=accumulation)
    grads, sums = jax.jit(sums_of)(params, batch, None, frozen)
    found, grads = mean_gradients(grads, sums)
    assert float(found["loss"]) == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    for ours, theirs in metrics.items():
        assert float(found[ours]) == pytest.approx(expected["metrics"][theirs], rel=1e-5, abs=1e-5), ours

    leaves = {"/".join(path): np.asarray(leaf) for path, leaf in flatten_dict(grads).items()}
    scale = max(row[0] for row in expected["gradients"].values())
    for row in ROWS:
        np.testing.assert_allclose(
            projections(to_tensor(row, leaves)), expected["gradients"][row.name], atol=1e-5 * scale, err_msg=row.name
        )


def test_ids_and_targets() -> None:
    """TRL's collator lists the chosen texts first."""
    found = pairs().pairs
    texts = [pair.chosen for pair in found] + [pair.rejected for pair in found]
    for text, ids, mask in zip(texts, RECORDED["pairs"]["ids"], RECORDED["pairs"]["mask"], strict=True):
        n = len(text.ids)
        assert text.ids.tolist() == ids[:n]
        assert text.is_target.astype(int).tolist() == mask[:n]
        assert not any(mask[n:])


def with_sft(objective: Objective, tokens: float) -> Objective:
    """Add the cross entropy as TRL does, divided by the mean number of tokens of the chosen answers in the batch.

    `post.sft` divides by the number of tokens of each answer instead, so that a loss does not depend on other rows.
    """

    def added(*args: Any) -> RowSums:
        sums = objective(*args)
        return sums._replace(loss_B=sums.loss_B - SFT * sums.others["log_p_chosen"] / tokens)

    return added


@pytest.mark.parametrize(
    ("name", "chunk", "accumulation"), [*((name, 0, 1) for name in SETTINGS), ("dpo", 7, 1), ("sft", 0, 4)]
)
def test_preferences(name: str, chunk: int, accumulation: int) -> None:
    expected = RECORDED["pairs"]["losses"][name]
    settings = PostConfig(**{"objective": "dpo", "beta": expected["options"]["beta"]} | SETTINGS[name])
    data = pairs()
    objective = preference_objective(GPT(MODEL).apply, settings, chunk)
    if name == "sft":
        tokens = float(np.mean([pair.chosen.is_target.sum() for pair in data.pairs]))
        objective = with_sft(objective, tokens)
    batch = data.windows(np.arange(len(data.pairs)), MODEL.block_size)
    metrics = {
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
        "margin": "rewards/margins",
        "accuracy": "rewards/accuracies",
        "log_p_chosen": "logps/chosen",
        "log_p_rejected": "logps/rejected",
    }
    check(objective, batch, weights(100), expected, metrics, accumulation)


def rollout() -> dict[str, np.ndarray]:
    """Return the batch of TRL's recorded rollout, with log probabilities of a policy that has moved since."""
    recorded = {name: np.array(value) for name, value in RECORDED["rollout"]["rollout"].items()}
    B, T = len(recorded["prompt_ids"]), MODEL.block_size
    windows_BT3 = np.full((B, T, 3), (0, -1, -1), np.int32)
    log_p_BT, reference_BT = np.zeros((2, B, T), np.float32)
    for row in range(B):
        prompt = recorded["prompt_ids"][row][recorded["prompt_mask"][row] == 1].tolist()
        length = recorded["completion_mask"][row].sum()
        answer = recorded["completion_ids"][row][:length].tolist()
        ids = prompt + answer
        targets = slice(len(prompt) - 1, len(ids) - 1)
        windows_BT3[row, : len(ids) - 1, 0] = ids[:-1]
        windows_BT3[row, targets, 1] = answer
        windows_BT3[row, : len(ids) - 1, 2] = 0
        log_p_BT[row, targets] = recorded["old_per_token_logps"][row][:length]
        reference_BT[row, targets] = recorded["ref_per_token_logps"][row][:length]
    tokens = recorded["completion_mask"].sum()
    return {
        "windows": windows_BT3,
        "log_p": log_p_BT,
        "reference_log_p": reference_BT,
        "metrics": {"reward": recorded["rewards"].astype(np.float32)},
        "weight": np.full(B, B / tokens, np.float32),
    }


def test_a_masked_answer_has_no_loss_but_is_counted() -> None:
    """TRL does the same: it multiplies the mask of the answer's tokens by 0."""
    batch = rollout() | {"advantage": np.linspace(-1, 1, len(rollout()["log_p"]), dtype=np.float32)}
    counted_B = (np.arange(len(batch["advantage"])) != 1).astype(np.float32)
    sums = []
    for mask in (False, True):
        settings = PostConfig(objective="grpo", reward=("json",), kl=0.05, mask_truncated=mask)
        objective = policy_objective(GPT(MODEL).apply, settings)
        sums.append(jax.jit(lambda p, b, f=objective: f(p, b, None, ()))(weights(0), batch | {"counted": counted_B}))
    every, masked = sums
    np.testing.assert_allclose(masked.loss_B, every.loss_B * counted_B, rtol=1e-6)
    assert every.loss_B[1] != 0
    assert masked.count_B.tolist() == every.count_B.tolist()
    assert masked.others["kl"][1] == 0
    assert masked.others["answer_tokens"].tolist() == every.others["answer_tokens"].tolist()


@pytest.mark.parametrize(("name", "accumulation"), [*((name, 1) for name in POLICIES), ("dapo", 8)])
def test_policies(name: str, accumulation: int) -> None:
    expected = RECORDED["rollout"]["losses"][name]
    recorded = RECORDED["rollout"]["rollout"]
    settings = PostConfig(**{"objective": "grpo", "reward": ("json",)} | POLICIES[name])
    batch = rollout()
    reward_PG = batch["metrics"]["reward"].reshape(-1, recorded["group"])
    advantage_B = advantages(reward_PG, VARIANTS[settings.objective].advantage).reshape(-1)
    if name == "rloo":
        np.testing.assert_allclose(advantage_B, recorded["leave_one_out"], atol=1e-6)
    elif name != "dr_grpo":
        np.testing.assert_allclose(advantage_B, recorded["advantages"], atol=1e-5)
    else:
        advantage_B = np.array(recorded["advantages"], np.float32)  # TRL's advantages are an argument of its loss
    metrics = {"kl": "kl", "clipped": "clip_ratio/region_mean"} if name == "dapo" else {}
    objective = policy_objective(GPT(MODEL).apply, settings)
    check(objective, batch | {"advantage": advantage_B}, (), expected, metrics, accumulation)


def truncated_rollout(settings: PostConfig) -> tuple[list[Prompt], list[Generation], Rewards]:
    """Return TRL's recorded prompts and answers, without an end if they are truncated, and our rewards."""
    recorded = RECORDED["truncated"]["rollout"]
    prompts = []
    answers = []
    for row, ids in enumerate(recorded["answers"]):
        padded = recorded["prompt_ids"][row]
        prompts.append(Prompt(padded[recorded["prompt_mask"][row].index(1) :], "", {}))
        log_p = recorded["old_per_token_logps"][row][: len(ids)]
        if ids[-1] == EOS:
            answers.append(Generation("", ids[:-1], "stop", log_p=log_p, stop_id=EOS))
        else:
            answers.append(Generation("", ids, "length", log_p=log_p))

    def reward(prompts: Any, texts: Any, records: Any) -> list[float]:
        return list(recorded["rewards"])

    return prompts, answers, reward_answers(reward, Config(post=settings), prompts, answers)


@pytest.mark.parametrize(("name", "accumulation"), [*((name, 1) for name in POLICIES), ("dapo", 8)])
def test_policies_without_a_loss_on_truncated_answers(name: str, accumulation: int) -> None:
    """TRL's trainer masks the answers without an end, and adds its own penalty for long answers to the rewards."""
    expected = RECORDED["truncated"]["losses"][name]
    recorded = RECORDED["truncated"]["rollout"]
    given = {
        "objective": "grpo",
        "reward": ("json",),
        "mask_truncated": True,
        "overlong_tokens": recorded["overlong"],
        "max_new_tokens": recorded["longest"],
    }
    settings = PostConfig(**given | POLICIES[name])
    config = Config(model=MODEL, data=DataConfig(window=MODEL.block_size), post=settings)
    prompts, answers, rewards = truncated_rollout(replace(settings, max_new_tokens=recorded["longest"]))
    np.testing.assert_allclose(rewards.parts["reward_overlong"], recorded["penalties"], atol=1e-6)

    reward_PG = rewards.total_B.reshape(-1, recorded["group"])
    advantage_B = advantages(reward_PG, VARIANTS[settings.objective].advantage).reshape(-1)
    theirs = "leave_one_out" if name == "rloo" else "advantages"
    if name == "dr_grpo":
        advantage_B = np.array(recorded["advantages"], np.float32)  # TRL's advantages are an argument of its loss
    np.testing.assert_allclose(advantage_B, recorded[theirs], atol=1e-5)

    batch = rollout_batch(config, prompts, answers, advantage_B, rewards.metrics)
    batch["weight"] = token_weights(batch)
    is_target_BT = batch["windows"][..., 1] >= 0
    if settings.kl:
        for row, log_p in enumerate(recorded["ref_per_token_logps"]):
            targets = is_target_BT[row]
            batch["reference_log_p"][row, targets] = log_p[: targets.sum()]
    assert batch["counted"].tolist() == [float(any(mask)) for mask in recorded["completion_mask"]]
    assert is_target_BT[batch["counted"] > 0].sum() == recorded["num_items_in_batch"]

    if name == "rloo":
        # TRL's ratio of a masked answer is 1, so its loss is -A, without a gradient; our loss is 0.
        constant = -float(np.mean(advantage_B * (1 - batch["counted"])))
        expected = expected | {"loss": expected["loss"] - constant}

    metrics = {"kl": "kl", "clipped": "clip_ratio/region_mean"} if name == "dapo" else {}
    objective = policy_objective(GPT(MODEL).apply, settings)
    check(objective, batch, (), expected, metrics, accumulation)


def test_the_entropy_is_the_mean_over_drawn_tokens() -> None:
    """Like TRL's metrics, it is a mean over the tokens of each answer, then over answers; padding does not count."""
    recorded = RECORDED["rollout"]["rollout"]
    expected = []
    for log_p, mask in zip(recorded["old_per_token_logps"], recorded["completion_mask"], strict=True):
        expected.append(-np.mean([value for value, kept in zip(log_p, mask, strict=True) if kept]))
    objective = policy_objective(GPT(MODEL).apply, PostConfig(objective="grpo", reward=("json",)))
    batch = jax.tree.map(
        lambda x: np.concatenate([x, np.full_like(x, -1)]), rollout() | {"advantage": np.zeros(8, np.float32)}
    )
    sums = jax.jit(objective)(weights(0), batch, None, ())
    assert sums.others["entropy"].sum() / sums.count_B.sum() == pytest.approx(np.mean(expected), rel=1e-5)
