"""Taps and edits: names, laws, gradients, batches of edits, generation with a cache, and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import COMMON, MODELS, lm_of, random_ids, repository

import jaxgpt
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm.weights import quantize
from jaxgpt.model import GPT
from jaxgpt.model.module import Module
from jaxgpt.model.scan import stack_layers
from jaxgpt.study import names, run
from jaxgpt.study.run import _forward

B, T, V = 2, 7, 17
CI = pytest.mark.ci


@pytest.fixture(scope="module")
def lm():
    return lm_of("gpt2")


@pytest.fixture(scope="module")
def one():
    """A model of one layer, which compiles faster."""
    return lm_of("gpt2", n_layer=1)


@pytest.fixture(scope="module")
def ids(lm):
    return random_ids(lm.config.model, (B, T))


def plain_logits(lm, ids):
    return jax.jit(lambda params, ids: GPT(lm.config.model).apply({"params": params}, ids))(lm.params, ids)


def close(a, b):
    np.testing.assert_allclose(a, b, atol=1e-5)


def documented():
    """Return the shapes of docs/inside.md by name, as letters."""
    page = (repository() / "docs" / "inside.md").read_text()
    return dict(re.findall(r"^\| `(\S+)` \| ([A-Z1 ]+) \|", page, re.M))


def documented_shapes(c):
    """Return the shapes of docs/inside.md by name, for the sizes of a config."""
    sizes = {
        "B": B, "T": T, "S": T, "V": V, "D": c.n_embd, "N": c.n_head, "K": c.kv_heads, "H": c.head_width,
        "F": c.mlp_width, "E": c.n_experts, "1": 1,
    }  # fmt: skip
    shapes = {name: tuple(sizes[letter] for letter in letters.split()) for name, letters in documented().items()}
    if not c.qk_norm_per_head:  # one norm of all heads
        for x in "qk":
            shapes[f"h.0.attn.{x}_norm.scale"] = (B, T, 1)
            shapes[f"h.0.attn.{x}_norm.out"] = (B, T, c.n_embd)
    return shapes


def parts_of(c):
    """Return whether a model has the activations with a part of a name."""
    return {
        "pos_embed": c.positions in ("learned", "sinusoidal"),
        "ln_f": c.final_norm,
        "rot_": c.positions == "rope",
        "mlp.": c.mlp != "none",
        "mlp.pre": not c.n_experts,
        "mlp.post": not c.n_experts,
        "mlp.up": c.mlp == "gated" and not c.n_experts,
        "router": bool(c.n_experts),
        "shared": bool(c.n_experts and c.shared_experts),
        "shared.up": c.mlp == "gated",
        "_norm.": c.qk_norm,
        **{f"ln_{i}.": c.norm != "none" and c.norm_position != "output" for i in "12"},
        **{f"ln_{i}_out.": c.norm_position in ("output", "both") for i in "12"},
    }


@pytest.mark.parametrize("name", [n if n in COMMON else pytest.param(n, marks=CI) for n in MODELS])
def test_names_and_shapes_are_those_of_the_docs(name):
    """The values are compared with TransformerLens's in tests/parity/test_taps.py."""
    lm = lm_of(name, n_layer=1)
    c = lm.config.model
    absent = [part for part, is_there in parts_of(c).items() if not is_there]
    expected = documented_shapes(c)
    for key in list(expected):
        if any(part in key for part in absent):
            del expected[key]

    listed = names(lm, (B, T))
    assert {key: x.shape for key, x in listed.items()} == expected
    first, *_, last = listed
    assert (first, last) == ("embed", "logits")
    assert {str(x.dtype) for x in listed.values()} == {"float32"}


def test_without_taps_and_edits_the_program_is_that_of_the_model(lm, ids, monkeypatch):
    """The program also equals the program of a model without named activations."""
    config = lm.config.model

    def lowered(taps, edits):
        text = _forward.lower(lm.gpt, lm.params, ids, taps, edits).as_text()
        return text.replace("jit_forward", "jit_plain").replace("result.logits", "result")

    def plain():
        def plain(params, tokens_BT):
            return GPT(config).apply({"params": params}, tokens_BT)

        return jax.jit(plain).lower(lm.params, ids).as_text()

    text = plain()
    assert lowered((), ()) == text
    assert lowered(("h.0.attn.q",), ()) != text
    assert lowered((), (("h.0.attn.q", jnp.tanh),)) != text
    monkeypatch.setattr(Module, "named", lambda self, name, x: x)
    assert plain() == text


def test_taps_are_in_the_order_of_computation_and_change_nothing(lm, ids):
    plain = run(lm, ids)
    assert plain.taps == {}
    close(plain.logits, plain_logits(lm, ids))
    out = run(lm, ids, ["logits", "h.*.attn.pattern", "embed"])
    assert list(out.taps) == ["embed", "h.0.attn.pattern", "h.1.attn.pattern", "logits"]
    close(out.logits, plain.logits)
    close(out.taps["logits"], plain.logits)
    close(run(lm, np.asarray(ids).tolist(), "embed").taps["embed"], out.taps["embed"])


def scaled(lm, a):
    """Scale the outputs of layer 0's heads through the weights."""
    params = jax.tree.map(lambda w: w, lm.params)  # a copy of the dicts
    o_proj = params["h_0"]["attn"]["o_proj"]
    o_proj["kernel"] = o_proj["kernel"] * jnp.repeat(a, lm.config.model.head_width)[:, None]
    return lm._replace(params=params)


@pytest.mark.ci
def test_edits_gradients_and_batches_of_edits(one, ids):
    """Scaling each head's output by an edit equals scaling its rows of o_proj: values, gradients, and under vmap."""
    N = one.config.model.n_head
    a_N = jnp.linspace(-1.0, 1.5, N)

    def edited(a_N, taps=()):
        return run(one, ids, taps, {"h.0.attn.head_out": lambda x: x * a_N[None, None, :, None]})

    @jax.jit
    def by_weights(a_N):
        return GPT(one.config.model).apply({"params": scaled(one, a_N).params}, ids)

    out = edited(a_N, ["h.0.attn.head_out", "h.0.attn.out"])
    close(out.logits, by_weights(a_N))
    before = run(one, ids, ["h.0.attn.head_out"]).taps["h.0.attn.head_out"]
    close(out.taps["h.0.attn.head_out"], before * a_N[None, None, :, None])  # a tap is taken after the edit

    slope = jax.random.normal(jax.random.key(0), out.logits.shape)
    of_edits = jax.jit(jax.grad(lambda a: (edited(a).logits * slope).sum()))
    of_weights = jax.jit(jax.grad(lambda a: (by_weights(a) * slope).sum()))
    close(of_edits(a_N), of_weights(a_N))

    each = jax.jit(jax.vmap(lambda a: edited(a).logits))(jnp.stack([a_N, 0 * a_N]))
    close(each[0], out.logits)
    close(each[1], run(one, ids, edits={"h.0.attn.head_out": jnp.zeros_like}).logits)


@pytest.mark.ci
def test_gradient_of_an_activation(one, ids):
    """Compare with a difference quotient along a random direction."""
    shape = names(one, (B, T))["resid.mid.0"].shape
    direction = jax.random.normal(jax.random.key(1), shape)

    @jax.jit
    @jax.value_and_grad
    def loss(change):
        logits = run(one, ids, edits={"resid.mid.0": lambda x: x + change}).logits
        return jnp.square(logits).mean()

    _, gradient = loss(jnp.zeros(shape))
    # The quotient's own error falls with the square of the step: 1% at 0.05, 0.03% here, where rounding adds as much.
    up, _ = loss(0.01 * direction)
    down, _ = loss(-0.01 * direction)
    assert float(jnp.vdot(gradient, direction)) == pytest.approx(float(up - down) / 0.02, rel=3e-3)


PATTERN = "h.0.attn.pattern"


@pytest.mark.ci
def test_stacked_weights(one, ids):
    stacked = one._replace(params=jax.jit(stack_layers)(one.params))
    jax.tree.map(close, run(stacked, ids, [PATTERN]), run(one, ids, [PATTERN]))


@pytest.mark.ci
def test_quantized_weights(one, ids):
    quantized = jax.jit(quantize, static_argnums=(1, 2))(one.params, one.config.model, "int8")
    int8 = one._replace(params=quantized)
    out = run(int8, ids, [PATTERN])
    close(out.logits, plain_logits(int8, ids))
    pattern = run(one, ids, [PATTERN]).taps[PATTERN]
    assert np.abs(out.taps[PATTERN] - pattern).max() < 0.05


def halve(x):
    return x / 2


def opposite_at_1(x):
    return x.at[:, 1].multiply(-3)


EDITS = {"h.0.attn.head_out": halve, "embed": opposite_at_1, "resid.post.0": jnp.sin}


@pytest.mark.parametrize(
    ("name", "n_layer"), [("gpt2", 1), pytest.param("gpt2", 2, marks=CI), pytest.param("gemma", 2, marks=CI)]
)
def test_generation_with_edits_equals_full_passes(name, n_layer):
    """Compare the greedy text of the edited model, and every tap."""
    lm = lm_of(name, n_layer=n_layer)
    out = jaxgpt.study.generate(lm, [3, 1, 4], ["*"], EDITS, max_new_tokens=6, temperature=0)
    full = run(lm, [out.ids], ["*"], EDITS)
    assert out.ids[:3] == [3, 1, 4]
    assert out.ids[3:] == np.argmax(full.logits[0, 2:-1], -1).tolist() == out.generation.ids
    assert out.generation.finish_reason == "length"
    assert np.argmax(run(lm, [out.ids]).logits[0, 2:-1], -1).tolist() != out.generation.ids
    close(out.logits, full.logits)
    assert list(out.taps) == list(full.taps)
    for key, x in full.taps.items():
        close(out.taps[key], np.broadcast_to(x, out.taps[key].shape))


@pytest.mark.ci
def test_generation_may_end_past_the_context(one):
    """The last id has no position."""
    out = jaxgpt.study.generate(one, [3, 1, 4], ["embed"], max_new_tokens=10, temperature=0)
    assert len(out.ids) == 13
    full = run(one, [out.ids[:12]], ["embed"])
    close(out.logits, full.logits)
    close(out.taps["embed"], full.taps["embed"])


@pytest.mark.ci
@pytest.mark.parametrize(
    "settings", [{"top_k": 5}, {"temperature": 0, "no_repeat_ngram_size": 1, "stop_ids": [7]}], ids=str
)
def test_generation_without_edits_is_that_of_generate(lm, settings):
    """Test sampling, filters that read the text, padded vocabularies and texts that end early."""
    lm = lm._replace(tokenizer=make_tokenizer("ids", "", 0, 14))
    settings = {"max_new_tokens": 8, "key": 3} | settings
    found = jaxgpt.study.generate(lm, [3, 1, 4], ["h.0.attn.scores"], **settings)
    [expected] = jaxgpt.generate(lm, [3, 1, 4], **settings)
    assert found.generation._replace(log_p=()) == expected._replace(log_p=())
    close(found.generation.log_p, expected.log_p)
    read = len(found.ids)
    assert found.logits.shape == (1, read, V)
    assert found.taps["h.0.attn.scores"].shape == (1, 4, read, read)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"taps": ["h.0.attn.patern"]}, r"no activation 'h.0.attn.patern' \(did you mean h.0.attn.pattern\?\)"),
        ({"taps": ["h.7.*"]}, r"no activation 'h.7.\*': .*names\(lm\)"),
        ({"edits": {"resid.pre.9": jnp.tanh}}, r"no activation 'resid.pre.9' \(did you mean resid.pre.\d\?\)"),
        ({"edits": {"embed": lambda x: x[:, 1:]}}, r"embed returned float32 \[1, 1, 16\] for float32 \[1, 2, 16\]"),
        ({"edits": {"embed": lambda x: x.astype(jnp.bfloat16)}}, "returned bfloat16"),
        ({"edits": {"embed": lambda x: 0.0}}, r"returned float32 \[\] for float32"),
        ({"ids": [[0] * 13]}, "13 tokens do not fit the context of 12"),
        ({"ids": [[V]]}, f"id {V}"),
        ({"ids": [[1, 2], [3]]}, "not rows of different lengths"),
        ({"ids": [[1.5]]}, r"integer ids of shape \[B, T\], not float64 of shape \(1, 1\)"),
    ],
)
def test_bad_input_is_one_line(lm, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        run(lm, **({"ids": [[1, 2]]} | arguments))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperatur": 0}, r"unknown setting temperatur \(did you mean temperature\?\)"),
        ({"max_new_tokens": 13}, "exceed the context"),
        ({"max_new_tokens": 1, "taps": ["hidden"]}, "no activation"),
    ],
)
def test_bad_arguments_of_generation_are_one_line(lm, arguments, message):
    with pytest.raises(UserError, match=message):
        jaxgpt.study.generate(lm, [1], **arguments)
