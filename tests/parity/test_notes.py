"""The four decoders of the study notes, each compared with an independent implementation of the same weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import from_arrays

from jaxgpt.convert.tensors import WeightRow, WeightTable, expand, leaf_shapes, norm, tensor_shape
from jaxgpt.model import GPT
from jaxgpt.ops.attention import row_positions
from jaxgpt.presets import preset
from jaxgpt.trainer.build import build

torch = pytest.importorskip("torch")
nn = torch.nn

SEEDS = (0, 1, 2)
TOLERANCE = 2e-5


def small(name, **changes):
    """Return the model of a preset at a small size."""
    return preset(name).with_model(dropout=0.0, **changes).model


@functools.cache
def compiled(config, method):
    return jax.jit(functools.partial(GPT(config).apply, method=method))


def logits(config, params, ids):
    with jax.default_matmul_precision("highest"):
        return np.asarray(compiled(config, "__call__")({"params": params}, jnp.asarray(ids, jnp.int32)))


def sinusoids(T, D):
    """Independent implementation of Vaswani et al. 2017, section 3.5."""
    out = np.zeros((T, D))
    for p in range(T):
        for i in range(0, D, 2):
            out[p, i] = np.sin(p / 10000 ** (i / D))
            out[p, i + 1] = np.cos(p / 10000 ** (i / D))
    return out


def shaken(module, seed):
    """Randomize all parameters of a module, including biases and gains."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * 0.2 + (1.0 if parameter.ndim == 1 else 0.0)
    return module.eval()


def arrays(module):
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


def params_of(table, module, config):
    return from_arrays(table, arrays(module), config)


QKV = tuple(f"h_{{}}/attn/{q}_proj/kernel" for q in "qkv")


def linear(name: str, *leaves: str) -> WeightTable:
    return (
        WeightRow(f"{name}.weight", tuple(f"{leaf}/kernel" for leaf in leaves), output_first=True),
        WeightRow(f"{name}.bias", tuple(f"{leaf}/bias" for leaf in leaves)),
    )


def multihead(name: str) -> WeightTable:
    """torch's MultiheadAttention packs q, k and v as GPT-2 does, output first, under different names."""
    return (
        WeightRow(f"{name}.in_proj_weight", QKV, output_first=True),
        WeightRow(f"{name}.in_proj_bias", tuple(leaf.replace("kernel", "bias") for leaf in QKV)),
        *linear(f"{name}.out_proj", "h_{}/attn/o_proj"),
    )


# The original has neither embedding nor head; its matrices are (in, out).
NUMPY_MINIMAL: WeightTable = (
    *(WeightRow(f"layers.{{}}.W{q}", (f"h_{{}}/attn/{q}_proj/kernel",)) for q in "qkv"),
    WeightRow("layers.{}.W1", ("h_{}/mlp/up_proj/kernel",)),
    WeightRow("layers.{}.W2", ("h_{}/mlp/down_proj/kernel",)),
)


def numpy_minimal(x, weights, n_layer):
    """The decoder of the notes: `x` is [T, D], weights are looked up by name."""

    def norm(y):
        return (y - y.mean(-1, keepdims=True)) / (y.std(-1, keepdims=True) + 1e-5)

    T, D = x.shape
    x = x + sinusoids(T, D)
    for layer in range(n_layer):
        w = {name: weights[f"layers.{layer}.{name}"].astype(np.float64) for name in ("Wq", "Wk", "Wv", "W1", "W2")}
        scores = (x @ w["Wq"]) @ (x @ w["Wk"]).T / np.sqrt(D)
        scores = scores + np.triu(np.ones((T, T)), 1) * -1e9
        e = np.exp(scores - scores.max(-1, keepdims=True))
        x = norm(x + (e / e.sum(-1, keepdims=True)) @ (x @ w["Wv"]))
        x = norm(x + np.maximum(x @ w["W1"], 0) @ w["W2"])
    return x


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("length", [1, 16])
def test_numpy_minimal(seed, length):
    config = small("numpy-minimal", vocab_size=7, n_embd=16, n_inner=32, n_layer=3, block_size=16)
    rng = np.random.default_rng(seed)
    rows = expand(NUMPY_MINIMAL, config)
    weights = {row.name: rng.normal(0, 0.3, tensor_shape(row, leaf_shapes(config))) for row in rows}
    params = from_arrays(NUMPY_MINIMAL, weights, config)
    x_BTD = rng.normal(0, 1, (2, length, 16))
    with jax.default_matmul_precision("highest"):
        out, _, _ = compiled(config, "stack")(
            {"params": params}, jnp.asarray(x_BTD, jnp.float32), row_positions(length)
        )
    expected = np.stack([numpy_minimal(x, weights, 3) for x in x_BTD])
    assert np.abs(np.asarray(out) - expected).max() < TOLERANCE


TORCH_DECODER: WeightTable = (
    WeightRow("embedding.weight", ("wte/embedding",)),
    *multihead("layers.{}.self_attn"),
    *norm("layers.{}.norm1", "h_{}/ln_1"),
    *linear("layers.{}.linear1", "h_{}/mlp/up_proj"),
    *linear("layers.{}.linear2", "h_{}/mlp/down_proj"),
    *norm("layers.{}.norm2", "h_{}/ln_2"),
    *norm("norm", "ln_f"),
    *linear("head", "lm_head"),
)


class TorchDecoder(nn.Module):
    """Uses the encoder layer with a causal mask, because `nn.TransformerDecoderLayer` needs a memory to attend to."""

    def __init__(self, V, D, N, L):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(D, N, 4 * D, dropout=0.0, batch_first=True) for _ in range(L)
        )
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + torch.tensor(sinusoids(*x.shape[1:]), dtype=torch.float32)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


GPT2_STYLE: WeightTable = (
    WeightRow("wte.weight", ("wte/embedding",)),
    WeightRow("wpe.weight", ("wpe/embedding",)),
    *norm("blocks.{}.ln_1", "h_{}/ln_1"),
    *multihead("blocks.{}.attn"),
    *norm("blocks.{}.ln_2", "h_{}/ln_2"),
    *linear("blocks.{}.c_fc", "h_{}/mlp/up_proj"),
    *linear("blocks.{}.c_proj", "h_{}/mlp/down_proj"),
    *norm("ln_f", "ln_f"),
    *linear("head", "lm_head"),
)


class GPT2Style(nn.Module):
    def __init__(self, V, T, D, N, L):
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.wpe = nn.Embedding(T, D)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(D),
                    "attn": nn.MultiheadAttention(D, N, batch_first=True),
                    "ln_2": nn.LayerNorm(D),
                    "c_fc": nn.Linear(D, 4 * D),
                    "c_proj": nn.Linear(4 * D, D),
                }
            )
            for _ in range(L)
        )
        self.ln_f = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, ids):
        T = ids.shape[1]
        # torch rejects the notes' mask of three axes for several heads; two axes mean the same.
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        x = self.wte(ids) + self.wpe(torch.arange(T))
        for block in self.blocks:
            y = block["ln_1"](x)
            x = x + block["attn"](y, y, y, attn_mask=mask, need_weights=False)[0]
            x = x + block["c_proj"](nn.functional.gelu(block["c_fc"](block["ln_2"](x))))
        return self.head(self.ln_f(x))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("length", [7, 24])
@pytest.mark.parametrize("name", ["torch-decoder", "gpt2-style"])
def test_torch_modules(name, seed, length):
    V, T, D, N, L = 29, 24, 32, 8, 3
    config = small(name, vocab_size=V, block_size=T, n_embd=D, n_head=N, n_layer=L)
    original, table = (
        (TorchDecoder(V, D, N, L), TORCH_DECODER) if name == "torch-decoder" else (GPT2Style(V, T, D, N, L), GPT2_STYLE)
    )
    original = shaken(original, seed)
    ids = np.random.default_rng(seed).integers(0, V, (2, length))
    with torch.no_grad():
        expected = original(torch.tensor(ids)).numpy()
    assert np.abs(logits(config, params_of(table, original, config), ids) - expected).max() < TOLERANCE


STATQUEST: WeightTable = (
    WeightRow("we.weight", ("wte/embedding",)),
    *(WeightRow(f"W_{q}.weight", (f"h_0/attn/{q}_proj/kernel",), output_first=True) for q in "qkv"),
    *linear("fc_layer", "lm_head"),
)


class StatQuest(nn.Module):
    def __init__(self):
        super().__init__()
        self.we = nn.Embedding(5, 2)
        self.W_q, self.W_k, self.W_v = (nn.Linear(2, 2, bias=False) for _ in "qkv")
        self.fc_layer = nn.Linear(2, 5)

    def forward(self, ids):
        x = self.we(ids)
        x = x + torch.tensor(sinusoids(*x.shape), dtype=torch.float32)
        mask = torch.tril(torch.ones(len(ids), len(ids))) == 0
        scores = (self.W_q(x) @ self.W_k(x).T / 2**0.5).masked_fill(mask, -1e9)
        return self.fc_layer(x + torch.softmax(scores, 1) @ self.W_v(x))


@pytest.mark.parametrize("seed", SEEDS)
def test_statquest_forward_and_one_step(seed):
    """Adam's first update moves every weight by about the learning rate, so compare after two."""
    original = shaken(StatQuest(), seed)
    config = preset("statquest").with_model(vocab_size=5)
    params = params_of(STATQUEST, original, config.model)
    windows = np.array([[0, 1, 2, 4, 3, 4], [2, 1, 0, 4, 3, 4]], np.int32)
    expected = original(torch.tensor(windows[0, :5], dtype=torch.long)).detach().numpy()
    assert np.abs(logits(config.model, params, windows[:1, :5])[0] - expected).max() < TOLERANCE

    program = build(config)
    state = program.init(params)
    adam = torch.optim.Adam(original.parameters(), lr=0.1)
    for window in windows:
        loss = nn.functional.cross_entropy(original(torch.tensor(window[:-1]).long()), torch.tensor(window[1:]).long())
        adam.zero_grad()
        loss.backward()
        adam.step()
        # Promotion is needed because optax's Adam adds Python integers to arrays.
        with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
            state, figures = program.step(state, program.put(window[None]))
        assert abs(float(figures["loss"]) - loss.item()) < 1e-5
    after = params_of(STATQUEST, original, config.model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), jax.device_get(state.params), after)
