"""Strings in, text out: batches, stopping, streaming, contexts, bad input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpt
from jaxgpt.config import Config, ModelConfig, UserError
from jaxgpt.data.tokenizer import CharTokenizer, Tokenizer, WordTokenizer, make_tokenizer
from jaxgpt.decoding import compilations
from jaxgpt.lm import LM, model_functions
from jaxgpt.model import GPT
from jaxgpt.model.params import abstract_params

LETTERS = "abcdefghijklmnop\n"


def tiny(tokenizer: Tokenizer | None = None, seed: int = 0, std: float = 0.4, **settings: Any) -> LM:
    """A random model, with weights large enough for it to say different things."""
    tokenizer = tokenizer or CharTokenizer(LETTERS)
    defaults = {"block_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": tokenizer.vocab_size}
    model = ModelConfig(**(defaults | settings))
    leaves, tree = jax.tree.flatten(abstract_params(model))
    rng = np.random.default_rng(seed)
    values = [jnp.asarray(rng.normal(0, std, leaf.shape), jnp.float32) for leaf in leaves]
    return LM(Config(model=model), jax.tree.unflatten(tree, values), tokenizer)


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny()


RAGGED = ["a", "abcabc", "ponmlk\njihgfedcba" * 3, "bb"]


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}]
)
def test_each_row_equals_its_solo_run(lm: LM, settings: dict[str, Any]) -> None:
    keys = jax.random.split(jax.random.key(5), len(RAGGED))
    together = jaxgpt.generate(lm, RAGGED, max_new_tokens=40, key=keys, **settings)
    for i, prompt in enumerate(RAGGED):
        [alone] = jaxgpt.generate(lm, [prompt], max_new_tokens=40, key=keys[i : i + 1], **settings)
        assert alone == together[i]
    assert len({out.text for out in together}) == len(RAGGED)


@pytest.mark.parametrize("settings", [{"temperature": 1e6}, {"num_beams": 3}])
def test_ids_without_a_text_are_never_generated(settings: dict[str, Any]) -> None:
    """A head may have more rows than the tokenizer has ids, as GPT-2's often has for the sake of matrix units."""
    lm = tiny(vocab_size=500)
    V = lm.tokenizer.vocab_size
    assert V < 100
    [out] = jaxgpt.generate(lm, ["ab"], max_new_tokens=40, **settings)
    assert len(out.ids) == len(out.text) == 40
    assert max(out.ids) < V


@pytest.mark.parametrize("positions", ["learned", "rope", "sinusoidal"])
def test_logits_of_a_ragged_row_are_those_of_the_row_alone(positions: str) -> None:
    lm = tiny(positions=positions)
    model = model_functions(lm.config.model, "float32")
    rows = [lm.tokenizer.encode(p) for p in RAGGED]
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), longest), np.int32)
    for out, row in zip(ids, rows, strict=True):
        out[longest - len(row) :] = row
    start = jnp.array([longest - len(row) for row in rows])
    logits, _ = model.extend(lm.params, jnp.asarray(ids), model.cache(start, longest), True)
    for i, row in enumerate(rows):
        alone = GPT(lm.config.model).apply({"params": lm.params}, jnp.asarray(row)[None])
        np.testing.assert_allclose(logits[i, -1], alone[0, -1], atol=1e-5)


def test_beams_of_ragged_prompts_equal_their_solo_runs(lm: LM) -> None:
    settings: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 10}
    together = jaxgpt.generate(lm, RAGGED, **settings)
    alone = [out for prompt in RAGGED for out in jaxgpt.generate(lm, [prompt], **settings)]
    assert [out.ids for out in together] == [out.ids for out in alone]
    np.testing.assert_allclose([o.score for o in together], [o.score for o in alone], atol=1e-5)


def test_the_text_is_the_likeliest_by_a_model_without_cache(lm: LM) -> None:
    ids = lm.tokenizer.encode("abc").tolist()
    [out] = jaxgpt.generate(lm, [ids], temperature=0, max_new_tokens=30)
    apply = jax.jit(lambda t: GPT(lm.config.model).apply({"params": lm.params}, t))
    for i, token in enumerate(out.ids):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : 3 + i] = ids + out.ids[:i]
        assert int(apply(padded)[0, 2 + i].argmax()) == token


def test_one_device_and_eight_give_the_same_text() -> None:
    from jaxgpt.config import MeshConfig
    from jaxgpt.model.params import boxed_params
    from jaxgpt.parallel import make_mesh, shardings

    lm = tiny(n_head=8, n_embd=64)
    mesh = make_mesh(MeshConfig(data=1, tensor=8))
    boxed = jax.eval_shape(lambda: boxed_params(GPT(lm.config.model), 0))
    spread = lm._replace(params=jax.device_put(lm.params, shardings(boxed, lm.config.model, mesh)))
    assert len(spread.params["h_0"]["mlp"]["up_proj"]["kernel"].sharding.device_set) == 8
    settings: dict[str, Any] = {"max_new_tokens": 50, "temperature": 0.8, "top_k": 10, "key": jax.random.key(3)}
    assert jaxgpt.generate(spread, RAGGED, **settings) == jaxgpt.generate(lm, RAGGED, **settings)


def test_a_seed_gives_one_text_and_another_another(lm: LM) -> None:
    texts = [jaxgpt.generate(lm, ["a"], max_new_tokens=30, key=jax.random.key(s))[0].text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    two = jaxgpt.generate(lm, ["a"], max_new_tokens=30, num_return_sequences=2)
    assert two[0].text != two[1].text


def test_prompts_of_fifty_lengths_cost_as_many_compilations_as_there_are_buckets() -> None:
    lm = tiny(n_layer=1)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 101, 50)
    before = compilations()
    for length in lengths:
        jaxgpt.generate(
            lm, [rng.integers(0, 16, length).tolist()], max_new_tokens=int(rng.integers(1, 20)), temperature=0
        )
    buckets = {max(8, 1 << (int(n) - 1).bit_length()) for n in lengths}
    assert compilations() - before <= len(buckets) == 5
    before = compilations()
    jaxgpt.generate(lm, [[1] * 100], max_new_tokens=5, temperature=0)
    assert compilations() == before


# --- stopping ------------------------------------------------------------------------------------------------------


def test_an_end_token_ends_a_row_and_only_that_row() -> None:
    words = WordTokenizer(["</s>", *"abcdefgh"])
    lm = tiny(words)
    free = jaxgpt.generate(lm, [[i] for i in range(1, 9)], max_new_tokens=20, key=jax.random.key(1))
    assert {out.finish_reason for out in free} == {"stop", "length"}
    for out in free:
        assert 0 not in out.ids
        assert len(out.ids) == 20 or out.finish_reason == "stop"


def test_stop_ids(lm: LM) -> None:
    [free] = jaxgpt.generate(lm, ["a"], max_new_tokens=60)
    stop = free.ids[20]
    [out] = jaxgpt.generate(lm, ["a"], max_new_tokens=60, stop_ids=[stop])
    assert out.ids == free.ids[: free.ids.index(stop)]
    assert out.finish_reason == "stop"


def test_a_stop_string_across_tokens_ends_the_text_where_it_begins(lm: LM) -> None:
    free = jaxgpt.generate(lm, ["a", "b", "c"], max_new_tokens=90)
    stop = free[1].text[40:43]
    stopped = jaxgpt.generate(lm, ["a", "b", "c"], max_new_tokens=90, stop=stop)
    for whole, out in zip(free, stopped, strict=True):
        found = stop in whole.text
        assert out.text == (whole.text[: whole.text.index(stop)] if found else whole.text)
        assert out.finish_reason == ("stop" if found else "length")
        assert lm.tokenizer.decode(out.ids) == out.text
    assert stopped[1].finish_reason == "stop"


def test_beams_end_at_stop_strings_and_no_row_depends_on_its_company(lm: LM) -> None:
    rows = ["a", "abcabc"]
    beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12}
    free = jaxgpt.generate(lm, rows, **beams)
    stops = [free[0].text[4:6], free[3].text[7:9]]
    together = jaxgpt.generate(lm, rows, stop=stops, **beams)
    alone = [out for prompt in rows for out in jaxgpt.generate(lm, [prompt], stop=stops, **beams)]
    assert [out._replace(score=None) for out in together] == [out._replace(score=None) for out in alone]
    np.testing.assert_allclose([o.score for o in together], [o.score for o in alone], atol=1e-5)
    for out in together:
        assert lm.tokenizer.decode(out.ids) == out.text
        assert not any(stop in out.text for stop in stops)
    ended = [(i // 3, out) for i, out in enumerate(together) if out.finish_reason == "stop"]
    assert len(ended) > 1
    apply = jax.jit(lambda t: jax.nn.log_softmax(GPT(lm.config.model).apply({"params": lm.params}, t)[0]))
    for row, out in ended:  # what ended it counts, and nothing beyond
        means = []
        for stop in stops:
            before, new = lm.tokenizer.encode(rows[row]).tolist(), lm.tokenizer.encode(out.text + stop).tolist()
            log_p = apply(np.array([(before + new + [0] * 32)[:32]]))
            means.append(np.mean([log_p[len(before) + i - 1, token] for i, token in enumerate(new)]))
        assert min(abs(mean - out.score) for mean in means) < 1e-5
    # A stop string that does not come changes nothing, though the host looks at every candidate.
    looked = jaxgpt.generate(lm, rows, stop="abcdefgh", **beams)
    assert [out.ids for out in looked] == [out.ids for out in free]


def test_length_counts_new_tokens_or_all(lm: LM) -> None:
    outs = jaxgpt.generate(lm, ["a", "abcdef"], max_length=20, temperature=0)
    assert [len(out.ids) for out in outs] == [19, 14]
    assert {out.finish_reason for out in outs} == {"length"}
    whole = jaxgpt.generate(lm, ["a", "abcdef"], max_new_tokens=30, temperature=0)
    assert whole[1].ids[:14] == outs[1].ids
    assert len(jaxgpt.generate(lm, ["a"])[0].ids) == 100


# --- streaming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 4, 7, None])
@pytest.mark.parametrize("kind", ["char", "byte"])
def test_pieces_put_together_are_the_text(kind: str, block: int | None) -> None:
    lm = tiny(make_tokenizer(kind, LETTERS, 0, 0))
    [plain] = jaxgpt.generate(lm, ["abc"], max_new_tokens=50)
    for stop in ((), (plain.text[20:22], plain.text[30:34])):
        settings: dict[str, Any] = {"max_new_tokens": 50, "stop": [s for s in stop if "\ufffd" not in s and s]}
        whole = jaxgpt.generate(lm, ["abc", "b"], **settings)
        pieces = list(jaxgpt.stream(lm, ["abc", "b"], block=block, **settings))
        for row, out in enumerate(whole):
            assert "".join(p.text for p in pieces if p.row == row) == out.text
            assert [p.done for p in pieces if p.row == row and p.done] == [out]
    if block == 1 and kind == "char":
        assert len(pieces) > 10


# --- contexts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("length", [5, 16, 40])
def test_sliding_equals_the_crop_without_a_cache(positions: str, length: int) -> None:
    lm = tiny(block_size=16, positions=positions, n_layer=2)
    prompts = [np.random.default_rng(length).integers(0, 16, length).tolist(), [3, 1]]
    outs = jaxgpt.generate(lm, prompts, temperature=0, max_new_tokens=40, beyond="slide")
    apply = jax.jit(lambda t: GPT(lm.config.model).apply({"params": lm.params}, t))
    for prompt, out in zip(prompts, outs, strict=True):
        ids = list(prompt)
        # The rows share their window: a short one keeps all it has, as nanoGPT would crop it alone.
        for token in out.ids:
            window = ids[-16:]
            padded = np.zeros((1, 16), np.int32)
            padded[0, : len(window)] = window
            assert int(apply(padded)[0, len(window) - 1].argmax()) == token
            ids.append(token)


def test_beyond_the_context_is_an_error_with_both_numbers_unless_asked_for() -> None:
    lm = tiny(block_size=16)
    with pytest.raises(UserError, match=r"10 tokens and 20 new .* context of 16: at most 7"):
        jaxgpt.generate(lm, [[1] * 10], max_new_tokens=20)
    assert len(jaxgpt.generate(lm, [[1] * 10], max_new_tokens=7)[0].ids) == 7
    with pytest.raises(UserError, match=r"20 tokens .* context of 16"):
        jaxgpt.generate(lm, [[1] * 20], max_new_tokens=1)
    rope = tiny(block_size=16, positions="rope")
    assert len(jaxgpt.generate(rope, [[1] * 20], max_new_tokens=30)[0].ids) == 30


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens"),
        ({"max_length": 1}, "max-length"),
        ({"max_length": 9, "max_new_tokens": 3}, "choose one"),
        ({"temperature": float("nan")}, "temperature"),
        ({"num_beams": 0}, "num-beams"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num-return-sequences 3 is more than num-beams 2"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length-penalty"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early-stopping"),
        ({"num_beams": 2, "top_k": 5}, "top-k has no part in beam search"),
        ({"num_return_sequences": 0}, "num-return-sequences"),
        ({"stop": [""]}, "empty"),
        ({"stop": "aX"}, "can never be made"),
        ({"stop_ids": [99]}, "stop id 99"),
        ({"beyond": "wrap"}, "beyond"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(lm: LM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        jaxgpt.generate(lm, ["a"], **settings)
    assert "\n" not in str(error.value)


def test_empty_prompts() -> None:
    assert jaxgpt.generate(tiny(), [""], max_new_tokens=5) == jaxgpt.generate(tiny(), ["\n"], max_new_tokens=5)
    words = tiny(WordTokenizer(["a", "b", "<EOS>"]))
    assert jaxgpt.generate(words, [""], max_new_tokens=5) == jaxgpt.generate(words, [[2]], max_new_tokens=5)
    for none in (tiny(CharTokenizer("ab")), tiny(WordTokenizer("ab"))):
        with pytest.raises(UserError, match="no sign for a beginning"):
            jaxgpt.generate(none, [""])
    assert jaxgpt.generate(tiny(), []) == []


@pytest.mark.parametrize(
    ("stop", "possible"), [("b", True), ("a b", True), ("bo ca", True), ("q", False), ("a  b", False), ("a x b", False)]
)
def test_stop_strings_of_words(stop: str, possible: bool) -> None:
    from jaxgpt.prompts import check_stops

    words = WordTokenizer(["a", "b", "foobo", "cat"])
    if possible:
        check_stops(words, [stop])
    else:
        with pytest.raises(UserError, match="can never be made"):
            check_stops(words, [stop])
