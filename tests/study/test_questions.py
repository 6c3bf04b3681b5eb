"""Questions about a model, each against its definition in NumPy or an edit of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODELS, lm_of, make, random_ids, small

import jaxgpt
from jaxgpt import study
from jaxgpt.config import Config, TrainConfig
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.lm.weights import quantize
from jaxgpt.model.params import flatten_params

B, T, V, L, N, H = 2, 6, 17, 2, 4, 4
RIGHT = 3
WRONG = 5
METRIC = study.LogitDifference(RIGHT, WRONG)


@pytest.fixture(scope="module")
def lm():
    return lm_of("gpt2")


@pytest.fixture(scope="module")
def ids(lm):
    return random_ids(lm.config.model, (B, T))


@pytest.fixture(scope="module")
def out(lm, ids):
    return study.run(lm, ids, ["*"])


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5)


def difference(out):
    """Compute METRIC in NumPy."""
    logits = np.asarray(out.logits)[:, -1]
    return (logits[:, RIGHT] - logits[:, WRONG]).mean()


def weights(lm):
    return {name: np.asarray(w) for name, w in flatten_params(lm.params).items()}


def read(lm, x_BTD):
    """Apply the final norm and the tied head of GPT-2."""
    w = weights(lm)
    centred = x_BTD - x_BTD.mean(-1, keepdims=True)
    normed = centred / np.sqrt(centred.var(-1, keepdims=True) + lm.config.model.norm_eps)
    return (normed * w["ln_f/scale"] + w["ln_f/bias"]) @ w["wte/embedding"].T


def test_logit_lens(lm, ids, out):
    seen = study.lens(lm, ids, k=3)
    assert seen.ids.shape == seen.probabilities.shape == (L + 1, B, T, 3)
    answer = np.argmax(out.logits, -1)
    np.testing.assert_array_equal(seen.answer, answer)
    for layer, name in enumerate(["resid.pre.0", "resid.pre.1", "resid.post.1"]):
        logits = read(lm, np.asarray(out.taps[name]))
        np.testing.assert_array_equal(seen.ids[layer], np.argsort(-logits, -1)[..., :3])
        top = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        close(seen.probabilities[layer], -np.sort(-top, -1)[..., :3])
        of_answer = np.take_along_axis(logits, answer[..., None], -1)
        np.testing.assert_array_equal(seen.rank[layer], 1 + (logits > of_answer).sum(-1))
    assert (seen.rank[L] == 1).all()
    assert (seen.rank[:L] > 1).any()
    for b, t in np.ndindex(B, T):
        assert seen.first[b, t] == np.flatnonzero(seen.rank[:, b, t] == 1)[0]


def test_the_lens_ends_in_its_answer():
    """Test bfloat16, where two programs of the same model differ by more than the most probable tokens do."""
    config = small("gpt2", vocab_size=8000, block_size=64, n_layer=1, n_embd=16, n_head=2, init_std=0.02)
    tokenizer = make_tokenizer("ids", "", 0, 8000)
    _, params = make(config)
    lm = jaxgpt.LM(Config(model=config, train=TrainConfig(compute_dtype="bfloat16")), params, tokenizer)
    seen = study.lens(lm, random_ids(config, (4, 64)), k=1)
    np.testing.assert_array_equal(seen.ids[-1, ..., 0], seen.answer)
    assert (seen.rank[-1] == 1).all()
    rank_at_first = np.take_along_axis(np.asarray(seen.rank), np.asarray(seen.first)[None], 0)
    assert (rank_at_first == 1).all()


def test_the_lens_leaves_out_ids_without_a_text(lm, ids):
    short = lm._replace(tokenizer=make_tokenizer("ids", "", 0, 10))
    seen = study.lens(short, ids % 10, k=10)
    logits = np.asarray(study.run(lm, ids % 10).logits)[..., :10]
    np.testing.assert_array_equal(seen.answer, logits.argmax(-1))
    assert (seen.ids < 10).all()
    close(seen.probabilities.sum(-1), np.ones((L + 1, B, T)))


def test_the_answer_of_an_attribution_is_that_of_the_lens(lm, ids):
    """They match even where the largest logit belongs to an id without a text."""
    short = lm._replace(tokenizer=make_tokenizer("ids", "", 0, 5))
    tokens = ids % 5
    at = int(np.argwhere(np.argmax(study.run(lm, tokens).logits, -1) >= 5)[0, 1])
    answer = study.lens(short, tokens, 1).answer[:, at]
    found = study.attribution(short, tokens, None, at)
    expected = study.attribution(short, tokens, answer, at)
    close(found.logit, expected.logit)


NOT_GEMMA = [name for name in MODELS if name != "gemma"]


@pytest.mark.parametrize("name", ["gemma", *(pytest.param(name, marks=pytest.mark.ci) for name in NOT_GEMMA)])
def test_attribution_sums_to_the_logit(name):
    """Test every family: norms and their positions, gated and no MLPs, rotary positions, parallel residuals."""
    lm = lm_of(name)
    ids = random_ids(lm.config.model, (B, T))
    parts = study.attribution(lm, ids, [RIGHT, WRONG], position=4)
    close(parts.total(), parts.logit)
    logits = study.run(lm._replace(config=lm.config.with_model(logit_softcap=0.0)), ids).logits
    close(parts.logit, [logits[0, 4, RIGHT], logits[1, 4, WRONG]])
    assert np.abs(parts.heads).min() > 0
    assert parts.heads.shape == (L, B, lm.config.model.n_head)


@pytest.mark.ci
def test_attribution_with_quantized_weights(lm):
    """On a CPU, int8 products of few rows round their input; attributions must not need the gradient of rounding."""
    quantized = jax.jit(quantize, static_argnums=(1, 2))(lm.params, lm.config.model, "int8")
    int8 = lm._replace(params=quantized)
    parts = study.attribution(int8, random_ids(lm.config.model, (1, T)))
    close(parts.total(), parts.logit)
    assert np.abs(parts.heads).min() > 0


def test_attribution_of_heads_and_mlps(lm, ids, out):
    """Expect W_O of a head, then the final norm with its scale held fixed, then the product with the answer's row."""
    w = weights(lm)
    answer = np.argmax(out.logits[:, -1], -1)
    parts = study.attribution(lm, ids)
    close(parts.logit, np.asarray(out.logits)[:, -1].max(-1))

    def last(name):
        return np.asarray(out.taps[name])[:, -1]

    def direct(x_BD):
        centred = x_BD - x_BD.mean(-1, keepdims=True)
        normed = centred * last("ln_f.scale") * w["ln_f/scale"]
        return (normed * w["wte/embedding"][answer]).sum(-1)

    for layer in range(L):
        o_proj = w[f"h_{layer}/attn/o_proj/kernel"].reshape(N, H, -1)
        for head in range(N):
            z_BH = last(f"h.{layer}.attn.head_out")[:, head]
            close(parts.heads[layer, :, head], direct(z_BH @ o_proj[head]))
        close(parts.mlps[layer], direct(last(f"h.{layer}.mlp.out")))
    close(parts.embed, direct(last("embed")))
    close(parts.position, direct(last("pos_embed")))


def without(lm, path, index):
    """Set a part of a weight to zero."""
    layer, module, name = path.split("/")
    kernel = np.array(lm.params[layer][module][name]["kernel"])
    kernel[index] = 0
    changed = lm.params[layer][module] | {name: lm.params[layer][module][name] | {"kernel": kernel}}
    return lm._replace(params=lm.params | {layer: lm.params[layer] | {module: changed}})


@pytest.mark.ci
def test_zero_ablation_equals_zero_weights(lm, ids, out):
    found = study.ablate_heads(lm, ids, METRIC)
    assert found.ablated.shape == (L, N)
    close(found.clean, difference(out))
    for layer, head in ((0, 1), (1, 3)):
        rows = slice(head * H, (head + 1) * H)
        ablated = study.run(without(lm, f"h_{layer}/attn/o_proj", rows), ids)
        close(found.ablated[layer, head], difference(ablated))


@pytest.mark.ci
def test_mean_ablation_equals_an_edit(lm, ids, out):
    mean_H = np.asarray(out.taps["h.0.attn.head_out"])[:, :, 2].mean((0, 1))
    edited = study.run(lm, ids, edits={"h.0.attn.head_out": lambda x: x.at[:, :, 2].set(mean_H)})
    found = study.ablate_heads(lm, ids, METRIC, "mean")
    close(found.ablated[0, 2], difference(edited))


@pytest.fixture
def corrupted(ids):
    """The ids with a different third token."""
    changed = np.array(ids)
    changed[:, 2] = (changed[:, 2] + 1) % V
    return changed


@pytest.mark.ci
def test_patching_of_positions_equals_edits(lm, ids, out, corrupted):
    """The grid of TransformerLens is compared in tests/parity/test_taps.py."""
    found = study.patch(lm, ids, corrupted, METRIC)
    assert found.grid.shape == (L, T)
    close(found.clean, difference(out))
    close(found.corrupted, difference(study.run(lm, corrupted)))
    close(found.grid[0, 2], found.clean)  # the prompts differ in this token alone
    close(found.grid[:, :2], np.full((L, 2), found.corrupted))
    clean_BD = np.asarray(out.taps["resid.pre.1"])[:, 4]
    edited = study.run(lm, corrupted, edits={"resid.pre.1": lambda x: x.at[:, 4].set(clean_BD)})
    close(found.grid[1, 4], difference(edited))


@pytest.mark.ci
def test_patching_of_heads_equals_edits(lm, ids, out, corrupted):
    by_head = study.patch(lm, ids, corrupted, METRIC, "attn.head_out", "heads")
    clean_BTH = np.asarray(out.taps["h.1.attn.head_out"])[:, :, 3]
    edited = study.run(lm, corrupted, edits={"h.1.attn.head_out": lambda x: x.at[:, :, 3].set(clean_BTH)})
    assert by_head.grid.shape == (L, N)
    close(by_head.grid[1, 3], difference(edited))


@pytest.mark.ci
@pytest.mark.parametrize("over", ["heads", "positions"])
def test_patching_of_patterns_equals_edits(over, lm, ids, out, corrupted):
    """Their heads come before their positions, `[B, N, T, S]`."""
    found = study.patch(lm, ids, corrupted, METRIC, "attn.pattern", over)
    clean_BNTS = out.taps["h.1.attn.pattern"]
    part = (slice(None), 3) if over == "heads" else (slice(None), slice(None), 3)
    edited = study.run(lm, corrupted, edits={"h.1.attn.pattern": lambda x: x.at[part].set(clean_BNTS[part])})
    assert found.grid.shape == (L, N if over == "heads" else T)
    close(found.grid[1, 3], difference(edited))


def test_scores_of_known_patterns():
    """Score a previous-token head, an induction head and a uniform head."""
    tokens = jnp.asarray([[4, 9, 7, 4, 9, 7]])
    pattern = np.zeros((1, 3, T, T), np.float32)
    for t in range(T):
        pattern[0, 0, t, max(t - 1, 0)] = 1
        pattern[0, 1, t, t - 2 if t >= 3 else 0] = 1
        pattern[0, 2, t, : t + 1] = 1 / (t + 1)

    uniform_previous = np.mean([1 / (t + 1) for t in range(1, T)])
    close(study.previous_score(pattern), [1, 0.2, uniform_previous])

    uniform_induction = np.mean([1 / 4, 1 / 5, 1 / 6])
    close(study.induction_score(pattern, tokens), [0, 1, uniform_induction])

    uniform_entropy = np.log(np.arange(1, T + 1))
    close(study.entropy(pattern)[0], np.stack([np.zeros(T), np.zeros(T), uniform_entropy]))


@pytest.mark.ci
def test_heads(lm, ids, out):
    found = study.heads(lm, ids)
    for layer in range(L):
        pattern = out.taps[f"h.{layer}.attn.pattern"]
        close(found.previous[layer], study.previous_score(pattern))
        close(found.induction[layer], study.induction_score(pattern, ids))
        close(found.entropy[layer], study.entropy(pattern).mean((0, 2)))


def test_repeated_tokens(lm):
    tokens = np.asarray(study.repeated_tokens(lm, 5, rows=3, key=1))
    assert tokens.shape == (3, 10)
    np.testing.assert_array_equal(tokens[:, :5], tokens[:, 5:])
    assert len(set(map(tuple, tokens))) == 3
    assert (tokens < V).all()
    np.testing.assert_array_equal(study.repeated_tokens(lm, 5, rows=3, key=np.int64(1)), tokens)


def test_logit_difference_takes_ids_of_any_type():
    logits = np.random.default_rng(0).normal(size=(B, T, V)).astype(np.float32)
    expected = logits[0, 2, 3] / 2 + logits[1, 2, 4] / 2 - logits[:, 2, 5].mean()
    for right in ([3, 4], np.array([3, 4]), jnp.array([3, 4]), (3, 4)):
        metric = study.LogitDifference(right, np.int32(5), 2)
        assert metric == study.LogitDifference((3, 4), 5, 2)
        assert hash(metric) == hash(study.LogitDifference((3, 4), 5, 2))
        close(metric(jnp.asarray(logits)), expected)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (study.LogitDifference(V, 0), "an answer must be at least 0 and at most 16, not 17"),
        (study.LogitDifference(0, -1), "an answer must be at least 0 and at most 16, not -1"),
        (study.LogitDifference(0, 1.5), "an answer must be an integer, not 1.5"),
        (study.LogitDifference(0, 1, T), "position must be at least -6 and at most 5, not 6"),
        (study.LogitDifference(0, 1, -T - 1), "position must be at least -6 and at most 5, not -7"),
        (study.LogitDifference((0, 1, 2), 1), "3 answers for 2 rows"),
    ],
)
def test_a_logit_that_does_not_exist_is_one_line(metric, message):
    with pytest.raises(UserError, match=message):
        jax.eval_shape(metric, jax.ShapeDtypeStruct((B, T, V), jnp.float32))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda lm: study.lens(lm, [[1, 2]], k=V + 1), "k must be at least 1 and at most 17"),
        (lambda lm: study.attribution(lm, [[1, 2]], V), "an answer must be at least 0 and at most 16"),
        (lambda lm: study.attribution(lm, [[1, 2]], position=2), "position must be at least -2 and at most 1"),
        (lambda lm: study.attribution(lm, [[1, 2]] * 3, [1, 2]), "2 answers for 3 rows"),
        (lambda lm: study.ablate_heads(lm, [[1, 2]], METRIC, "median"), "replacement must be zero or mean: 'median'"),
        (lambda lm: study.patch(lm, [[1, 2]], [[1, 2, 3]], METRIC), r"\[1, 2\] and the corrupted ids \[1, 3\]"),
        (lambda lm: study.patch(lm, [[1]], [[2]], METRIC, "attn.heads_out"), "did you mean h.0.attn.head_out"),
        (lambda lm: study.patch(lm, [[1]], [[2]], METRIC, "{x}"), "no activation 'h.0.{x}'"),
        (lambda lm: study.patch(lm, [[1]], [[2]], METRIC, over="rows"), "over must be positions or heads: 'rows'"),
        (lambda lm: study.patch(lm, [[1]], [[2]], METRIC, "mlp.out", "heads"), "'mlp.out' has no heads"),
        (lambda lm: study.ablate_heads(lm, [[1, 2]], lambda x: x[:, -1, 3]), r"returned an array of shape \[1\]"),
        (lambda lm: study.repeated_tokens(lm, 7), "period must be at least 1 and at most 6"),
    ],
)
def test_bad_questions_are_one_line(lm, ask, message):
    with pytest.raises(UserError, match=message) as error:
        ask(lm)
    assert "\n" not in str(error.value)
