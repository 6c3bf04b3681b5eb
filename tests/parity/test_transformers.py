"""GPT-2, Llama and Qwen3 equal transformers with random weights: logits, gradients, hidden states and attention maps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpt
from jaxgpt.config import Config
from jaxgpt.convert.models import read_model
from jaxgpt.convert.tensors import expand, to_tensor
from jaxgpt.data.tokenizer_files import make_tokenizer
from jaxgpt.model import GPT
from jaxgpt.model.params import flatten_params
from jaxgpt.ops.attention import document_positions
from jaxgpt.train.loss import cross_entropy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V = 61
EAGER = {"attn_implementation": "eager", "bos_token_id": None, "eos_token_id": None, "vocab_size": V}
GPT2 = {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4} | EAGER
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
} | EAGER
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}

CASES = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-unscaled": ("GPT2", GPT2 | {"scale_attn_weights": False}),
    "gpt2-by-layer": ("GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-upcast": ("GPT2", GPT2 | {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-inner-gelu": ("GPT2", GPT2 | {"n_inner": 48, "activation_function": "gelu"}),
    "gpt2-relu-untied": ("GPT2", GPT2 | {"activation_function": "relu", "tie_word_embeddings": False}),
    "gpt2-silu-eps": ("GPT2", GPT2 | {"activation_function": "silu", "layer_norm_epsilon": 1e-2}),
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama3-rope": ("Llama", LLAMA | {"rope_parameters": LLAMA3, "head_dim": 16}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "qwen3-tied": ("Qwen3", LLAMA | {"head_dim": 8, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "qwen3-window": (
        "Qwen3",
        LLAMA | {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
}


@functools.cache
def original(case, seed):
    kind, options = CASES[case]
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**options)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.15
        parameter.data = noise + (1.0 if "norm" in parameter_name or "ln_" in parameter_name else 0.0)
    return model


@pytest.fixture
def ours(tmp_path):
    def read(case, seed):
        original(case, seed).save_pretrained(tmp_path / "hf")
        return read_model(tmp_path / "hf")

    return read


@functools.cache
def compiled(config):
    return jax.jit(lambda params, tokens: GPT(config).apply({"params": params}, tokens))


@functools.cache
def gradient(config):
    def loss(params, tokens_BT):
        logits = GPT(config).apply({"params": params}, tokens_BT[:, :-1])
        return cross_entropy(logits, tokens_BT[:, 1:]).mean()

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("case", CASES)
def test_logits(case, ours):
    for seed in (0, 1):
        config, params, _ = ours(case, seed)
        for length in (5, config.block_size):
            ids = np.random.default_rng(seed).integers(0, V, (2, length))
            with torch.no_grad():
                expected = original(case, seed)(torch.tensor(ids)).logits.numpy()
            assert expected.std() > 0.1  # the output is not constant
            with jax.default_matmul_precision("highest"):
                out = np.asarray(compiled(config)(params, jnp.asarray(ids, jnp.int32)))
            assert np.abs(out - expected).max() < 2e-5


@pytest.mark.parametrize("case", CASES)
def test_gradients(case, ours):
    config, params, form = ours(case, 0)
    ids = np.random.default_rng(3).integers(0, V, (2, 14))
    model = original(case, 0)
    model.zero_grad()
    out = model(torch.tensor(ids[:, :-1])).logits
    torch.nn.functional.cross_entropy(out.reshape(-1, V), torch.tensor(ids[:, 1:]).reshape(-1)).backward()
    with jax.default_matmul_precision("highest"):
        grads = flatten_params(jax.device_get(gradient(config)(params, jnp.asarray(ids, jnp.int32))))
    theirs = dict(model.named_parameters())
    for row in expand(form.table, config):
        expected = theirs[row.name].grad.numpy()
        error = np.abs(to_tensor(row, {leaf: grads[leaf] for leaf in row.leaves}) - expected).max()
        # The keys' bias shifts all scores of a query equally, so its gradient is zero except for rounding.
        scale = max(np.abs(expected).max(), 1e-4)
        assert error < 1e-4 * scale, (row.name, error, scale)


@pytest.mark.parametrize("case", ["gpt2", "llama3-rope", "qwen3-window"])
def test_capture(case, ours):
    config, params, _ = ours(case, 0)
    lm = jaxgpt.LM(Config(model=config), params, make_tokenizer("ids", "", 0, V))
    ids = np.random.default_rng(5).integers(0, V, (2, 17))
    with torch.no_grad():
        theirs = original(case, 0)(torch.tensor(ids), output_hidden_states=True, output_attentions=True)
    with jax.default_matmul_precision("highest"):
        seen = jaxgpt.study.capture(lm, ids)
    assert len(seen.hidden) == config.n_layer + 1
    assert len(seen.attentions) == config.n_layer
    for mine, other in zip((*seen.hidden, *seen.attentions), (*theirs.hidden_states, *theirs.attentions), strict=True):
        assert np.abs(np.asarray(mine) - other.numpy()).max() < 1e-5


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_documents(case, ours):
    """Several documents in a row equal transformers with restarted positions and a block-diagonal mask."""
    config, params, _ = ours(case, 0)
    ids = np.random.default_rng(5).integers(0, V, (2, 17))
    sizes = (5, 1, 11), (8, 2, 7)
    documents = np.stack([np.repeat(range(3), row) for row in sizes])
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in sizes])
    allowed = np.tri(17, dtype=bool) & (documents[:, :, None] == documents[:, None, :])
    mask = torch.where(torch.tensor(allowed), 0.0, torch.finfo(torch.float32).min)[:, None]
    with torch.no_grad():
        given = {"attention_mask": mask, "position_ids": torch.tensor(positions)}
        expected = original(case, 0)(torch.tensor(ids), **given).logits.numpy()
        assert np.abs(original(case, 0)(torch.tensor(ids)).logits.numpy() - expected).max() > 0.1
    with jax.default_matmul_precision("highest"):
        packed = document_positions(jnp.asarray(documents, jnp.int32))
        np.testing.assert_array_equal(packed.position_BT, positions)
        run = jax.jit(lambda tokens, packed: GPT(config).apply({"params": params}, tokens, None, packed))
        out = np.asarray(run(jnp.asarray(ids, jnp.int32), packed))
    assert np.abs(out - expected).max() < 2e-5
