"""Generating text: batches, stopping, streaming, long contexts, bad input."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpt
from jaxgpt.config import BeamParams, Config, MeshConfig, ModelConfig, SamplingParams, TextParams
from jaxgpt.data.tokenizers.base import CharTokenizer, Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.decoding import TokenBuffer
from jaxgpt.decoding.sampler import decode_steps, prefill
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, engine, explain
from jaxgpt.lm.buffers import buffer_sizes, left_pad
from jaxgpt.lm.request import read_request
from jaxgpt.lm.sampler import for_decoding, sampler_of
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.model.params import abstract_params
from jaxgpt.model.scan import stack_layers
from jaxgpt.ops.activations import ACTIVATIONS
from jaxgpt.ops.norms import NORMS
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import shardings

LETTERS = "abcdefghijklmnop\n"


def tiny(tokenizer: Tokenizer | None = None, seed: int = 0, std: float = 0.4, **settings: Any) -> LM:
    """A random model, with weights large enough for varied output. Random biases would dominate the effect of the tokens."""
    tokenizer = tokenizer or CharTokenizer(LETTERS)
    size = {"block_size": 128, "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": tokenizer.vocab_size}
    model = ModelConfig(**(size | {"bias": False, "tie_embeddings": False} | settings))
    leaves, tree = jax.tree.flatten(abstract_params(model))
    rng = np.random.default_rng(seed)
    values = [jnp.asarray(rng.normal(0, std, leaf.shape), jnp.float32) for leaf in leaves]
    return LM(Config(model=model), jax.tree.unflatten(tree, values), tokenizer)


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny()


RAGGED = ["a", "abcabc", "ponmlk\njihgfedcba" * 3, "bb"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"temperature": 0}, marks=pytest.mark.long),
        pytest.param({"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}, marks=pytest.mark.ci),
    ],
)
def test_each_row_equals_its_prompt_alone(lm: LM, settings: dict[str, Any]) -> None:
    keys = jax.random.split(jax.random.key(5), len(RAGGED))
    together = jaxgpt.generate(lm, RAGGED, max_new_tokens=40, key=keys, **settings)
    for i, prompt in enumerate(RAGGED):
        [alone] = jaxgpt.generate(lm, [prompt], max_new_tokens=40, key=keys[i : i + 1], **settings)
        assert alone._replace(log_p=()) == together[i]._replace(log_p=())
        np.testing.assert_allclose(alone.log_p, together[i].log_p, atol=1e-5)
    assert len({out.text for out in together}) == len(RAGGED)


@pytest.mark.parametrize("settings", [{"temperature": 1e6}, pytest.param({"num_beams": 3}, marks=pytest.mark.ci)])
def test_ids_without_text_are_never_generated(settings: dict[str, Any]) -> None:
    """A head may have more rows than the tokenizer has ids, as padded GPT-2 vocabularies do."""
    lm = tiny(vocab_size=500)
    V = lm.tokenizer.vocab_size
    assert V < 100
    [out] = jaxgpt.generate(lm, ["ab"], max_new_tokens=40, **settings)
    assert len(out.ids) == len(out.text) == 40
    assert max(out.ids) < V
    if "temperature" in settings:
        assert explain(lm, "ab").stages[0][:2] == ("ids with text", 500 - V)
        assert sampler_of(lm) == sampler_of(lm._replace(tokenizer=copy.copy(lm.tokenizer)))  # equal filters


def test_beams_equal_each_prompt_alone(lm: LM) -> None:
    """In a small context, a row at its limit has no learned position left while a shorter prompt is continued."""
    small = tiny(block_size=16)
    for model, prompts, settings in (
        (lm, RAGGED, {"num_return_sequences": 2, "max_new_tokens": 10}),
        (small, ["a", "abcabc"], {}),
    ):
        together, *alone = (jaxgpt.generate(model, p, num_beams=2, **settings) for p in (prompts, *prompts))  # type: ignore[arg-type]
        each = [out for outs in alone for out in outs]
        assert [out.ids for out in together] == [out.ids for out in each]
        np.testing.assert_allclose([out.score for out in together], [out.score for out in each], atol=1e-5)
    assert [len(out.ids) for out in together] == [15, 10]


@pytest.mark.ci
def test_beams_of_one_length_rank_the_same_with_any_length_penalty(lm: LM) -> None:
    settings: dict[str, Any] = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 60}
    plain, *others = (jaxgpt.generate(lm, "ab", length_penalty=p, **settings) for p in (0.0, -5.0, 5.0))
    for outs, p in zip(others, (-5.0, 5.0), strict=True):
        assert [out.ids for out in outs] == [out.ids for out in plain]
        for out, score in zip(outs, (one.score for one in plain), strict=True):
            assert score is not None
            assert out.score == pytest.approx(score / 60**p, rel=1e-4)


@pytest.mark.ci
def test_stacked_weights_generate_stream_explain_and_converse_the_same(lm: LM) -> None:
    stacked = lm._replace(params=stack_layers(lm.params))
    settings: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0}
    expected = jaxgpt.generate(lm, "abc", **settings)
    assert jaxgpt.generate(stacked, "abc", **settings) == expected
    assert [piece.done for piece in jaxgpt.stream(stacked, "abc", block=None, **settings)] == expected
    assert explain(stacked, "abc", temperature=0).token == expected[0].ids[0]
    tokenizer = copy.copy(lm.tokenizer)
    tokenizer.special = SpecialTokens({}, {"chat_template": "{{ messages[0].content }}"})
    talker = stacked._replace(tokenizer=tokenizer)
    assert jaxgpt.chat(talker, [{"role": "user", "content": "abc"}], **settings).ids == expected[0].ids


def spread_over(lm: LM, **axes: int) -> LM:
    """Return the model with its weights on a mesh."""
    mesh = make_mesh(MeshConfig(**{"data": 1, **axes}))
    boxed = jax.eval_shape(lambda: boxed_params(GPT(lm.config.model), 0))
    spread = lm._replace(params=jax.device_put(lm.params, shardings(boxed, lm.config.model, mesh)))
    kernel = spread.params["h_0"]["mlp"]["up_proj"]["kernel"]
    assert len(kernel.sharding.device_set) == math.prod(axes.values())
    return spread


@pytest.mark.ci
@pytest.mark.parametrize(
    "axes", [{"tensor": 8}, {"data": 2}, pytest.param({"data": 4, "fsdp": 2}, marks=pytest.mark.long)], ids=str
)
def test_one_and_several_devices_give_the_same_text(axes: dict[str, int]) -> None:
    """Test several rows, one long prompt for tiled attention, and three beams; devices need not divide the rows."""
    lm = tiny(block_size=256, positions="rope", n_head=8, n_embd=64)
    spread = spread_over(lm, **axes)
    sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 10, "top_p": 0.95, "key": jax.random.key(3)}
    for prompts, settings in ((RAGGED, sampling), ("abcd" * 33, {"temperature": 0.0}), ("abc", {"num_beams": 3})):
        wanted, found = (jaxgpt.generate(model, prompts, max_new_tokens=9, **settings) for model in (lm, spread))
        assert [out.ids for out in found] == [out.ids for out in wanted]
    tokens = np.arange(36).reshape(3, 12) % 17
    expected, logits = (jaxgpt.study.run(model, tokens).logits for model in (lm, spread))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.ci
def test_one_compilation_per_bucket_of_prompt_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    chex.clear_trace_counter()
    for function in (prefill, decode_steps):
        monkeypatch.setattr(engine, function.__name__, chex.assert_max_traces(function, n=5))
    lm = tiny(n_layer=1, n_embd=24)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 101, 50)
    for length in lengths:
        jaxgpt.generate(
            lm, [rng.integers(0, 16, length).tolist()], max_new_tokens=int(rng.integers(1, 20)), temperature=0
        )
    buckets = {max(8, 1 << (int(n) - 1).bit_length()) for n in lengths}
    assert len(buckets) == 5
    jaxgpt.generate(lm, [[1] * 100], max_new_tokens=5, temperature=0)


@pytest.mark.parametrize("tie", [True, False])
def test_matrices_are_converted_once_before_decoding(tie: bool) -> None:
    """Matrices get the dtype of their products; the logits of the steps stay equal bit for bit."""
    lm = tiny(n_layer=2, tie_embeddings=tie, bias=True)
    lm = lm._replace(config=replace(lm.config, train=replace(lm.config.train, compute_dtype="bfloat16")))
    ready = for_decoding(lm)
    model = sampler_of(lm).model
    dtypes = {leaf.ndim > 1: str(leaf.dtype) for leaf in jax.tree.leaves(ready.params)}
    assert dtypes == {True: "bfloat16", False: "float32"}
    found, expected = (model.apply({"params": each.params}, jnp.arange(10)[None]) for each in (ready, lm))
    assert (found == expected).all()


# --- stopping ------------------------------------------------------------------------------------------------------


def test_an_end_token_ends_only_its_row() -> None:
    words = WordTokenizer(["</s>", *"abcdefgh"])
    lm = tiny(words)
    free = jaxgpt.generate(lm, [[i] for i in range(1, 9)], max_new_tokens=8, key=jax.random.key(1))
    assert {out.finish_reason for out in free} == {"stop", "length"}
    for out in free:
        assert 0 not in out.ids
        assert len(out.ids) == 8 or out.finish_reason == "stop"


@pytest.mark.ci
def test_long_texts_are_the_same_in_blocks(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between blocks, progress is updated and Ctrl-C is handled."""
    settings = {"max_new_tokens": 40, "temperature": 0.9}
    at_once = jaxgpt.generate(lm, ["ab", "c"], **settings)
    monkeypatch.setattr("jaxgpt.lm.generation.BLOCK", 16)
    seen: list[tuple[int, int]] = []
    assert jaxgpt.generate(lm, ["ab", "c"], **settings, progress=lambda *done: seen.append(done)) == at_once
    assert seen == [(1, 40), (17, 40), (33, 40), (40, 40)]


def test_stop_ids(lm: LM) -> None:
    [free] = jaxgpt.generate(lm, ["a"], max_new_tokens=60)
    stop = free.ids[20]
    [out] = jaxgpt.generate(lm, ["a"], max_new_tokens=60, stop_ids=[stop])
    assert out.ids == free.ids[: free.ids.index(stop)]
    assert out.finish_reason == "stop"


@pytest.mark.ci
def test_a_stop_string_across_tokens_is_cut_off(lm: LM) -> None:
    free = jaxgpt.generate(lm, ["a", "b", "c"], max_new_tokens=60)
    stop = free[1].text[40:43]
    stopped = jaxgpt.generate(lm, ["a", "b", "c"], max_new_tokens=60, stop=stop)
    for whole, out in zip(free, stopped, strict=True):
        found = stop in whole.text
        assert out.text == (whole.text[: whole.text.index(stop)] if found else whole.text)
        assert out.finish_reason == ("stop" if found else "length")
        assert lm.tokenizer.decode(out.ids) == out.text
    assert stopped[1].finish_reason == "stop"


def test_length_counts_new_tokens_or_all(lm: LM) -> None:
    outs = jaxgpt.generate(lm, ["a", "abcdef"], max_length=20, temperature=0)
    assert [len(out.ids) for out in outs] == [19, 14]
    assert {out.finish_reason for out in outs} == {"length"}
    whole = jaxgpt.generate(lm, ["a", "abcdef"], max_new_tokens=30, temperature=0)
    assert whole[1].ids[:14] == outs[1].ids
    # The default is what the context allows, at most 200.
    assert [len(out.ids) for out in jaxgpt.generate(lm, ["a", "abc"], temperature=0)] == [127, 125]


# --- streaming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", pytest.param("byte", marks=pytest.mark.ci)])
def test_streamed_pieces_join_to_the_text(kind: str) -> None:
    lm = tiny(make_tokenizer(kind, LETTERS, 0, 0))
    [plain] = jaxgpt.generate(lm, ["abc"], max_new_tokens=50)
    for stop in ((), (plain.text[20:22], plain.text[30:34])):
        settings: dict[str, Any] = {"max_new_tokens": 50, "stop": [s for s in stop if "\ufffd" not in s and s]}
        whole = jaxgpt.generate(lm, ["abc", "b"], **settings)
        for block, least in ((1, 10), (7, 5), (None, 2)):
            pieces = list(jaxgpt.stream(lm, ["abc", "b"], block=block, **settings))
            assert len(pieces) >= least
            for row, out in enumerate(whole):
                assert "".join(p.text for p in pieces if p.row == row) == out.text
                assert [p.done for p in pieces if p.row == row and p.done] == [out]


# --- contexts ------------------------------------------------------------------------------------------------------


def test_a_row_beyond_its_maximum_and_the_context_disturbs_no_other() -> None:
    """The first text ends at `max_length`, but its row is computed on, beyond the learned positions."""
    lm = tiny(block_size=16)
    settings = {"max_length": 17, "temperature": 0.0}
    prompts = [list(range(1, 16)), [1, 2], [3]]
    together = jaxgpt.generate(lm, prompts, **settings)  # type: ignore[arg-type]
    alone = [jaxgpt.generate(lm, [prompt], **settings)[0] for prompt in prompts]  # type: ignore[arg-type]
    assert [(out.text, out.ids, out.finish_reason) for out in together] == [
        (out.text, out.ids, out.finish_reason) for out in alone
    ]
    assert [len(each.ids) for each in together] == [2, 15, 16]


def test_a_short_text_does_not_slide() -> None:
    lm = tiny(block_size=256)
    settings = {"max_new_tokens": 5, "temperature": 0.9}
    slide, plain = (jaxgpt.generate(lm, [[1, 2, 3], [4]], overflow=how, **settings) for how in ("slide", "error"))  # type: ignore[arg-type]
    assert slide == plain


@pytest.mark.parametrize(
    ("positions", "length"),
    [
        ("learned", 5),
        ("learned", 40),
        pytest.param("learned", 16, marks=pytest.mark.long),
        *(pytest.param("rope", length, marks=pytest.mark.long) for length in (5, 16, 40)),
    ],
)
def test_a_sliding_window_equals_cropping_without_a_cache(positions: str, length: int) -> None:
    lm = tiny(block_size=16, positions=positions, n_layer=2)
    later = np.random.default_rng(length).integers(8, 16, length).tolist()
    prompts = [[*range(8), *later][:length], [3, 1]]  # ids 0 to 7 are penalized although outside the window
    settings: dict[str, Any] = {"temperature": 0, "repetition_penalty": 2.0}
    outs = jaxgpt.generate(lm, prompts, max_new_tokens=40, overflow="slide", **settings)
    apply = jax.jit(lambda t: GPT(lm.config.model).apply({"params": lm.params}, t))
    for prompt, out in zip(prompts, outs, strict=True):
        ids = list(prompt)
        # Rows share the window; a short row keeps all its tokens, as nanoGPT would crop it alone.
        for token in out.ids:
            window = ids[-16:]
            padded = np.zeros((1, 16), np.int32)
            padded[0, : len(window)] = window
            logits = np.array(apply(padded)[0, len(window) - 1])
            seen = list(set(ids))
            logits[seen] *= np.where(logits[seen] > 0, 0.5, 2.0)
            assert int(logits.argmax()) == token
            ids.append(token)


def test_exceeding_the_context_raises_with_both_numbers_by_default() -> None:
    lm = tiny(block_size=16)
    with pytest.raises(UserError, match=r"10 tokens and 20 new .* context length of 16: generate at most 7"):
        jaxgpt.generate(lm, [[1] * 10], max_new_tokens=20)
    assert len(jaxgpt.generate(lm, [[1] * 10], max_new_tokens=7)[0].ids) == 7
    with pytest.raises(UserError, match=r"20 tokens .* context length of 16: shorten the prompt"):
        jaxgpt.generate(lm, [[1] * 20], max_new_tokens=1)
    rope = tiny(block_size=16, positions="rope")
    with pytest.raises(UserError, match=r"20 tokens and 30 new .* context length of 16"):
        jaxgpt.generate(rope, [[1] * 20], max_new_tokens=30, overflow="error")
    assert len(jaxgpt.generate(rope, [[1] * 20], max_new_tokens=30)[0].ids) == 30


@pytest.mark.parametrize(("registry", "name"), [(ACTIVATIONS, "relu"), (NORMS, "rmsnorm")])
def test_a_redefined_function_is_used_everywhere(registry: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny(activation="relu", norm="rmsnorm", n_embd=16)
    apply = jax.jit(GPT(lm.config.model).apply)
    found = []
    for function in (registry[name], lambda x, *args: -3 * jnp.cos(x)):
        monkeypatch.setitem(registry, name, function)
        with jax.disable_jit():
            expected = GPT(lm.config.model).apply({"params": lm.params}, jnp.array([[0, 1]]))[0, -1]  # type: ignore[index]
        [out] = jaxgpt.generate(lm, [[0, 1]], max_new_tokens=1, temperature=0)
        assert out.ids == [expected.argmax()]
        for logits in (apply({"params": lm.params}, jnp.array([[0, 1]])), jaxgpt.study.run(lm, [[0, 1]]).logits):
            np.testing.assert_allclose(logits[0, -1], expected, atol=1e-5)
        found.append(out.ids)
    assert found[0] != found[1]


def test_the_checked_memory_is_that_of_the_state_of_a_sampler(lm: LM) -> None:
    request = read_request(lm, "abc", TextParams(max_new_tokens=10))
    sizes = buffer_sizes(request.inputs, request.limits)
    begin = partial(prefill, request.make_sampler(SamplingParams()), size=sizes.text)
    state = jax.eval_shape(
        begin, request.lm.params, left_pad(request.inputs, sizes), jax.random.split(jax.random.key(0), 1)
    )
    of_slots = [leaf for leaf in jax.tree.leaves(state) if sizes.text in leaf.shape]
    assert request._memory(1, 1, sizes.text).needed == sum(leaf.size * leaf.dtype.itemsize for leaf in of_slots)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_length": 1}, "max_length"),
        ({"num_beams": 2, "top_k": 5}, "top_k 5 has no effect in beam search"),
        ({"lookup": 2, "num_return_sequences": 2}, "lookup 2 needs a single prompt"),
        ({"lookup": 2, "overflow": "slide"}, "lookup 2 needs .* no overflow slide"),
        ({"lookup": 2, "num_beams": 2}, "lookup 2 has no effect in beam search"),
        ({"overflow": "slide", "num_beams": 2}, "overflow slide has no effect in beam search"),
        ({"stop": [""]}, "empty"),
        ({"num_beams": 2, "stop": "a"}, "stop .* has no effect in beam search"),
        ({"stop_ids": [99]}, "a stop id must be .* at most 16, not 99"),
        ({"overflow": "wrap"}, "overflow"),
        ({"max_new_tokens": "10"}, "max_new_tokens must be an integer, not '10'"),
        ({"max_new_tokens": 2**24, "overflow": "slide", "num_return_sequences": 2**16}, "not enough memory"),
        ({"temperature": -1}, "temperature must be at least 0, not -1"),
        ({"stop": [1]}, "stop must be a list of strings"),
        ({"stop": 1}, "stop must be a list of strings"),
        ({"stop_ids": [1.5]}, "a stop id must be an integer, not 1.5"),
        ({"stop_ids": "a"}, "a stop id must be an integer, not 'a'"),
        ({"stop_ids": -1}, "a stop id must be at least 0 .*, not -1"),
        ({"key": 1.5}, "key .* must be an integer, not 1.5"),
        ({"key": True}, "key .* must be an integer"),
        ({"key": None}, "key .* must be an integer"),
        ({"key": -1}, "key .* must be at least 0, not -1"),
        ({"key": [1, 2]}, "key .* must be an integer"),
        ({"key": np.arange(3, dtype=np.uint32)}, "key .* must be an integer"),
        (
            {"key": jax.random.split(jax.random.key(0), 3)},
            r"key has shape \(3,\): pass one key, or one per text \(1\)",
        ),
        ({"key": jax.random.split(jax.random.key(0), 0)}, r"shape \(0,\)"),
        ({"key": jax.random.split(jax.random.key(0), (2, 2)), "num_return_sequences": 2}, r"one per text \(2\)"),
    ],
)
def test_invalid_settings_raise_one_line(lm: LM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        jaxgpt.generate(lm, ["a"], **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts must be"),
        (None, "prompts must be"),
        (b"ab", "prompts must be"),
        ({"a": 1}, "prompts must be"),
        (np.float32(1), "prompts must be"),
        ([None], "a prompt must be .*: None"),
        ([b"ab"], "a prompt must be"),
        (["a", 1], "a prompt must be"),
        ([1, "a"], "a prompt must be"),
        ([[1.7, 2.2]], "the id at position 0 .* must be an integer, not 1.7"),
        ([1, 2.0], "the id at position 1 .* must be an integer, not 2.0"),
        (np.array([1.0]), "the id at position 0 .* must be an integer, not 1.0"),
        ([[True]], "must be an integer, not True"),
        ([["a"]], "must be an integer, not 'a'"),
        ([np.ones((1, 2), int)], "must be an integer"),
        ([[1, 99]], r"id at position 1 of the prompt \(vocabulary of 17\) must be .* at most 16, not 99"),
        ([[2**70]], "must be .* at most"),
        ([[-1]], "must be at least 0 .*, not -1"),
        ([[]], "at least one"),
    ],
)
def test_invalid_prompts_raise_one_line(lm: LM, prompts: Any, message: str) -> None:
    for call in (jaxgpt.generate, jaxgpt.stream):
        with pytest.raises(UserError, match=message) as error:
            call(lm, prompts)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: jaxgpt.generate("runs/abc", "a"), r"jaxgpt\.load.*'runs/abc'"),  # type: ignore[arg-type]
        (lambda lm: jaxgpt.generate(lm._replace(config=lm.config.model), "a"), "a Config .*, not ModelConfig and dict"),
        (lambda lm: jaxgpt.stream(lm, "a", block=0), "block must be at least 1"),
        (lambda lm: explain(lm, None), "a prompt must be .*: None"),  # type: ignore[arg-type]
        (lambda lm: explain(lm, "a", filters=3), "filters must be a list of hashable functions"),  # type: ignore[arg-type]
        (lambda lm: jaxgpt.load(5), "must be a string or a Path: 5"),  # type: ignore[arg-type]
        (lambda lm: jaxgpt.save("run", "other"), "must be an LM"),  # type: ignore[arg-type]
        (lambda lm: jaxgpt.save(lm._replace(tokenizer=None), "run"), "to be saved, an LM needs its tokenizer"),  # type: ignore[arg-type]
        (lambda lm: jaxgpt.save(lm, None), "must be a string or a Path: None"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_the_wrong_type_raise_one_line(lm: LM, call: Callable[[LM], Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call(lm)
    assert "\n" not in str(error.value)


def test_generation_within_jit_is_one_line(lm: LM) -> None:
    def generate(params: Any) -> Any:
        return jaxgpt.generate(lm._replace(params=params), [[1, 2]], max_new_tokens=2)

    with pytest.raises(UserError, match=r"the weights are traced: .* call them outside jax.jit"):
        jax.jit(generate)(lm.params)


def test_generation_without_a_tokenizer_is_one_line(lm: LM) -> None:
    with pytest.raises(UserError, match=r"an LM needs its tokenizer: pass LM\(config, params, tokenizer\)"):
        jaxgpt.generate(lm._replace(tokenizer=None), [[1, 2]])  # type: ignore[arg-type]


def test_a_string_or_ids_are_one_prompt_and_numbers_may_have_any_type(lm: LM) -> None:
    ids = lm.tokenizer.encode("abc")
    plain = jaxgpt.generate(lm, ["abc"], max_new_tokens=8, stop_ids=[5])
    assert len(plain) == 1
    for prompts in (
        "abc",
        ids,
        ids.tolist(),
        ids.astype(np.uint8),
        jnp.asarray(ids),
        [ids],
        ids[None],
        [jnp.array(ids)],
    ):
        assert jaxgpt.generate(lm, prompts, max_new_tokens=8, stop_ids=[5]) == plain
    [first, _] = jaxgpt.generate(lm, ids[None].repeat(2, 0), max_new_tokens=8, stop_ids=5, key=np.int16(3))
    [alone] = jaxgpt.generate(lm, "abc", max_new_tokens=np.int64(8), stop_ids=np.array([5]), key=3)
    assert first.ids == alone.ids
    assert [p.done for p in jaxgpt.stream(lm, "abc", max_new_tokens=8, stop_ids={5}) if p.done] == plain
    assert TextParams(stop_ids=5).stop_ids == (5,)  # type: ignore[arg-type]
    # A call that raises does not affect later calls.
    with pytest.raises(UserError, match="must be an integer"):
        jaxgpt.generate(lm, "abc", max_new_tokens=8.0, stop_ids=5)  # type: ignore[arg-type]
    assert jaxgpt.generate(lm, "abc", max_new_tokens=jnp.int32(8), stop_ids=jnp.int32(5)) == plain


# --- keys ----------------------------------------------------------------------------------------------------------


def test_keys_may_be_seeds_or_any_type_of_key(lm: LM) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 20, "num_return_sequences": 2}
    plain = jaxgpt.generate(lm, ["a", "b"], key=jax.random.key(5), **settings)
    legacy = jax.random.PRNGKey(5)
    for key in (5, np.uint8(5), jnp.int32(5), legacy, np.asarray(legacy), jax.random.key(5)[None]):
        assert jaxgpt.generate(lm, ["a", "b"], key=key, **settings) == plain


def test_no_two_texts_share_their_randomness(lm: LM) -> None:
    keys = jax.random.split(jax.random.key(1), 6)
    for key in (1, keys[0], keys[:1], keys, jax.random.key_data(keys)):
        outs = jaxgpt.generate(lm, ["a", "a", "a"], num_return_sequences=2, max_new_tokens=20, key=key)
        assert len({out.text for out in outs}) == 6
    # One key per text: the same text as alone; the same key twice gives the same text twice.
    each = jaxgpt.generate(lm, ["a", "b"], num_return_sequences=2, max_new_tokens=20, key=keys[:4])
    for i, prompt in enumerate("aabb"):
        assert jaxgpt.generate(lm, prompt, max_new_tokens=20, key=keys[i : i + 1])[0].ids == each[i].ids
    same = jaxgpt.generate(lm, ["a", "a"], max_new_tokens=20, key=keys[jnp.array([2, 2])])
    assert same[0].ids == same[1].ids


@pytest.mark.ci
def test_x64_does_not_change_texts() -> None:
    lm = tiny(n_layer=1)
    calls: list[dict[str, Any]] = [
        {"top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "key": 2**31 + 1},
        {"num_beams": 2, "no_repeat_ngram_size": 2},
    ]
    texts = []
    for wide in (False, True):
        with jax.enable_x64(wide):
            texts.append([jaxgpt.generate(lm, ["a", "bc"], max_new_tokens=40, **call) for call in calls])
    assert [[out.ids for out in outs] for outs in texts[0]] == [[out.ids for out in outs] for outs in texts[1]]


# --- defaults ------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_settings_are_those_of_the_dataclasses(lm: LM) -> None:
    """Names and defaults are equal; the error of a wrong name suggests the right name, and a docstring lists all names."""
    declared = {f.name: f.default for f in (*fields(TextParams), *fields(SamplingParams)) if f.default is not None}
    both = declared | {f.name: f.default for f in fields(BeamParams)}
    assert jaxgpt.generate(lm, "a", max_new_tokens=9, **both) == jaxgpt.generate(lm, "a", max_new_tokens=9)  # type: ignore[arg-type]
    sampling = {f.name: f.default for f in fields(SamplingParams)}
    assert explain(lm, "a", **sampling).token == explain(lm, "a").token
    [*_, last] = jaxgpt.stream(lm, "a", max_new_tokens=9, **declared)  # type: ignore[arg-type]
    assert [last.done] == jaxgpt.generate(lm, "a", max_new_tokens=9)
    for call in (jaxgpt.generate, jaxgpt.stream, explain):
        with pytest.raises(UserError, match=r"unknown setting temprature \(did you mean temperature\?\); use one of"):
            call(lm, "a", temprature=1.0)  # type: ignore[operator]
        assert all(f"{name}" in (inspect.getdoc(jaxgpt.generate) or "") for name in both)
    with pytest.raises(UserError, match="unknown setting num_beams"):
        jaxgpt.stream(lm, "a", num_beams=2)


@pytest.mark.ci
def test_explain_names_the_first_token_of_generate(lm: LM) -> None:
    for key in (3, jax.random.key(4), jax.random.split(jax.random.key(5), 1)):
        choice = explain(lm, "abc", top_k=5, key=key)
        [out] = jaxgpt.generate(lm, "abc", top_k=5, key=key, max_new_tokens=1)
        assert out.ids == [choice.token]
        again = jax.random.wrap_key_data(jnp.array([choice.key], jnp.uint32))
        assert explain(lm, "abc", top_k=5, key=again).token == choice.token


# --- edge cases ----------------------------------------------------------------------------------------------------


def keep_none(logits_BV: jax.Array, text: TokenBuffer) -> jax.Array:
    return jnp.full_like(logits_BV, -jnp.inf)


@pytest.mark.ci
def test_a_text_ends_if_every_token_is_forbidden(lm: LM) -> None:
    for temperature in (0.0, 0.8):
        outs = jaxgpt.generate(lm, ["a", "abcb"], no_repeat_ngram_size=1, max_new_tokens=40, temperature=temperature)
        assert [(len(out.ids), out.finish_reason) for out in outs] == [(16, "exhausted"), (14, "exhausted")]
        assert sorted(outs[0].ids + lm.tokenizer.encode("a").tolist()) == list(range(17))
    with pytest.raises(UserError, match="prompt 1 has only 0 of 1 texts: raise no_repeat_ngram_size"):
        jaxgpt.generate(lm, ["a"], no_repeat_ngram_size=1, max_new_tokens=40, num_beams=2)
    with pytest.raises(UserError, match="no-repeat n-gram 1 forbids every token"):
        explain(lm, LETTERS, no_repeat_ngram_size=1)
    with pytest.raises(UserError, match="prompt 1 has only 0 of 1 texts"):
        jaxgpt.generate(lm, ["a"], filters=[keep_none], max_new_tokens=2, num_beams=2)


@pytest.mark.ci
def test_beams_of_few_tokens() -> None:
    one = tiny(CharTokenizer("a"), n_layer=1)
    [out] = jaxgpt.generate(one, "a", num_beams=2, max_new_tokens=5)
    assert (out.text, out.score) == ("aaaaa", 0.0)
    with pytest.raises(UserError, match="or lower num_return_sequences"):
        jaxgpt.generate(one, "a", num_beams=2, num_return_sequences=2, max_new_tokens=5)
    lm = tiny(n_layer=1)
    outs = jaxgpt.generate(lm, "a", num_beams=3, num_return_sequences=3, stop_ids=range(17), max_new_tokens=5)
    assert [(out.text, out.finish_reason) for out in outs] == [("", "stop")] * 3
    big = lm._replace(config=lm.config.with_model(vocab_size=2**16))
    with pytest.raises(UserError, match="not enough memory: 131,072 rows"):
        jaxgpt.generate(tiny(positions="rope"), "a", num_beams=2**16, max_new_tokens=2**20)
    with pytest.raises(UserError, match="num_beams 65536 is too many for a vocabulary of 65536: use at most 32768"):
        jaxgpt.generate(big, "a", num_beams=2**16)


def test_nan_weights_raise() -> None:
    lm = tiny(n_layer=1)
    broken = lm._replace(params=jax.tree.map(lambda x: x * jnp.nan, lm.params))
    for settings in ({"temperature": 0.8}, {"temperature": 0.0}, {"num_beams": 2}):
        with pytest.raises(UserError, match="logits are NaN"):
            jaxgpt.generate(broken, ["a", "abc"], max_new_tokens=5, **settings)  # type: ignore[arg-type]


def test_empty_prompts() -> None:
    assert jaxgpt.generate(tiny(), [""], max_new_tokens=5) == jaxgpt.generate(tiny(), ["\n"], max_new_tokens=5)
    words = tiny(WordTokenizer(["a", "b", "<EOS>"]))
    empty, end = (jaxgpt.generate(words, [prompt], max_new_tokens=5)[0] for prompt in ("", [2]))
    assert empty.ids == end.ids
    for none in (tiny(CharTokenizer("ab")), tiny(WordTokenizer("ab"))):
        with pytest.raises(UserError, match="no beginning-of-text or end-of-text token"):
            jaxgpt.generate(none, [""])
    assert jaxgpt.generate(tiny(), []) == []
