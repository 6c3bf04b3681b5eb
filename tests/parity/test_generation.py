"""Generation equals transformers: scores after every filter, beam search, and the calls of tutorials."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import from_arrays

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

import jaxgpt  # noqa: E402
from jaxgpt.config import Config, ModelConfig  # noqa: E402
from jaxgpt.convert.gpt2 import NANOGPT  # noqa: E402
from jaxgpt.data.tokenizers.base import WordTokenizer  # noqa: E402
from jaxgpt.decoding import SamplingParams, TokenBuffer, warp  # noqa: E402
from jaxgpt.lm import LM  # noqa: E402

WARP = jax.jit(warp, static_argnums=2)


def theirs(scores: np.ndarray, ids: list[list[int]], p: SamplingParams) -> np.ndarray:
    """Return transformers' logits processors in the order of its `generate`."""
    t = transformers
    chain = t.LogitsProcessorList()
    if p.repetition_penalty != 1:
        chain.append(t.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.no_repeat_ngram_size:
        chain.append(t.NoRepeatNGramLogitsProcessor(p.no_repeat_ngram_size))
    if p.temperature != 1:
        chain.append(t.TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        chain.append(t.TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(t.TopPLogitsWarper(p.top_p))
    if p.min_p > 0:
        chain.append(t.MinPLogitsWarper(p.min_p))
    return chain(torch.tensor(ids), torch.tensor(scores)).numpy()


def ours(scores: np.ndarray, ids: list[list[int]], p: SamplingParams) -> np.ndarray:
    size = len(ids[0])
    padded = jnp.pad(jnp.array(ids, jnp.int32), ((0, 0), (2, 3)), constant_values=((0, 0), (-1, 1)))
    return np.asarray(WARP(jnp.asarray(scores), TokenBuffer(padded, jnp.int32(size + 2)), p))


SETTINGS = {
    "repetition_penalty": [0.5, 1.0, 1.7],
    "no_repeat_ngram_size": [0, 1, 2, 3],
    "temperature": [0.01, 0.8, 1.0, 3.0],
    "top_k": [0, 1, 7, 10_000],
    "top_p": [0.0, 0.3, 0.95, 1.0],
    "min_p": [0.0, 0.1, 1.0],
}


def many_params() -> list[SamplingParams]:
    alone = [SamplingParams(**{name: value}) for name, values in SETTINGS.items() for value in values]
    rng = np.random.default_rng(0)
    every = list(itertools.product(*SETTINGS.values()))
    mixed = [dict(zip(SETTINGS, every[i], strict=True)) for i in rng.choice(len(every), 16, replace=False)]
    return alone + [SamplingParams(**settings) for settings in mixed]


@pytest.mark.parametrize("kind", ["random", "wide", "ties", "forbidden"])
@pytest.mark.parametrize("vocabulary", [40, pytest.param(1500, marks=pytest.mark.long)])
def test_scores_equal_those_of_transformers(kind: str, vocabulary: int) -> None:
    rng = np.random.default_rng(1)
    ids = [[5, 3, 5, 3, 5], [1, 2, 3, 1, 2], [9, 9, 9, 9, 9]]
    scores = rng.normal(0, 2, (3, vocabulary)).astype(np.float32)
    if kind == "wide":
        scores *= 1e4
    if kind == "ties":
        scores = np.round(scores)
    if kind == "forbidden":
        scores[0, ::2] = -np.inf
        scores[1, 1:] = -np.inf
    for sampling in many_params():
        expected = theirs(scores, ids, sampling)
        found = ours(scores, ids, sampling)
        where = np.isfinite(expected)
        if (
            kind == "ties"
        ):  # torch's sort is not stable: which of equal logits at the top-p boundary is kept is undefined
            found = np.sort(found)
            expected = np.sort(expected)
            where = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(found), where, err_msg=str(sampling))
        # Ours are relative to the maximum: subtract it from both. The tolerance is transformers' rounding before subtraction.
        rounding = 1e-6 * (1 + np.abs(expected[where]).max())
        expected, found = (x - x.max(-1, keepdims=True) for x in (expected, found))
        np.testing.assert_allclose(found[where], expected[where], rtol=1e-6, atol=rounding, err_msg=str(sampling))


# --- complete texts ------------------------------------------------------------------------------------------------


def twins(seed: int, vocabulary: int = 40, context: int = 64, eos: bool = True, layers: int = 2) -> tuple[Any, LM]:
    """Make the same random weights in transformers and here, larger than initial weights so that texts vary."""
    torch.manual_seed(seed)
    c = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=context, n_embd=32, n_layer=layers, n_head=4,
        bos_token_id=None, eos_token_id=0 if eos else None, pad_token_id=0,
    )  # fmt: skip
    hf = transformers.GPT2LMHeadModel(c).eval()
    with torch.no_grad():
        for p in hf.parameters():
            p.normal_(0, 0.3)
        # Sharpens the distribution and makes the end token likely.
        hf.transformer.ln_f.weight *= 4
        hf.transformer.ln_f.bias += 0.25 * hf.transformer.wte.weight[0].sign()
    tensors = {k: v.numpy() for k, v in hf.state_dict().items() if k != "lm_head.weight"}
    # transformers stores W as (in, out), nanoGPT as (out, in).
    tensors = {k: v.T if v.ndim == 2 and ".h." in k else v for k, v in tensors.items()}
    model = ModelConfig(vocab_size=vocabulary, block_size=context, n_embd=32, n_layer=layers, n_head=4)
    words = (["</s>"] if eos else ["w0"]) + [f"w{i}" for i in range(1, vocabulary)]
    return hf, LM(Config(model=model), jax.device_put(from_arrays(NANOGPT.table, tensors, model)), WordTokenizer(words))


def prompts(rng: np.random.Generator, rows: int, length: int, vocabulary: int) -> list[list[int]]:
    return rng.integers(1, vocabulary, (rows, length)).tolist()


def cut(ids: list[int], eos: int | None) -> list[int]:
    return ids[: ids.index(eos)] if eos in ids else ids


BATCH = 8  # cases per part; 25 parts


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 25))])
def test_beams_equal_those_of_transformers(part: int) -> None:
    rng = np.random.default_rng(part)
    stopped = 0
    for case in range(part * BATCH, (part + 1) * BATCH):
        eos = bool(rng.integers(0, 4))
        hf, lm = twins(case, vocabulary=14, eos=eos, layers=1)
        W = int(rng.choice([2, 3, 5]))
        n = int(rng.choice([1, 4, 12]))
        settings: dict[str, Any] = {
            "num_beams": W,
            "num_return_sequences": int(rng.integers(1, W + 1)),
            "length_penalty": float(rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0])),
            "early_stopping": [False, True, "never"][rng.integers(0, 3)],
            "max_new_tokens": n,
        }
        if not rng.integers(0, 3):
            settings["repetition_penalty"] = 1.3
        if not rng.integers(0, 3):
            settings["no_repeat_ngram_size"] = 2
        rows = prompts(rng, int(rng.choice([1, 3])), 5, 14)
        expected = hf.generate(
            torch.tensor(rows), do_sample=False, output_scores=True, return_dict_in_generate=True, **settings
        )
        found = jaxgpt.generate(lm, rows, **settings)
        assert len(found) == len(expected.sequences)
        for out, sequence, score in zip(found, expected.sequences, expected.sequences_scores, strict=True):
            assert out.ids == cut(sequence[5:].tolist(), 0 if eos else None), (case, settings)
            assert out.score == pytest.approx(float(score), abs=1e-5, rel=1e-5), (case, settings)
            stopped += out.finish_reason == "stop"
    assert stopped  # otherwise the end token is not tested


@pytest.mark.parametrize("eos", [True, False])
def test_greedy_texts_equal_those_of_transformers(eos: bool) -> None:
    for seed in range(5):
        hf, lm = twins(seed, eos=eos)
        rows = prompts(np.random.default_rng(seed), 3, 6, 40)
        for settings in ({}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}):
            expected = hf.generate(torch.tensor(rows), do_sample=False, max_new_tokens=20, **settings)
            found = jaxgpt.generate(lm, rows, temperature=0, max_new_tokens=20, **settings)
            for out, sequence in zip(found, expected, strict=True):
                assert out.ids == cut(sequence[6:].tolist(), 0 if eos else None)
