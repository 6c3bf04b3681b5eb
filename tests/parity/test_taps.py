"""Activations and grids of activation patching equal TransformerLens's on the same weights."""

import os

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import jaxgpt
from jaxgpt.config import Config
from jaxgpt.convert.open_model import read_model
from jaxgpt.data.tokenizers.new import make_tokenizer

pytestmark = pytest.mark.ci  # importing TransformerLens takes seconds

V = 61
L = 2
TOLERANCE = 1e-5
COMMON = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None}
CASES = {
    "GPT2": {"n_positions": 24, "n_embd": 32, "n_layer": L, "n_head": 4} | COMMON,
    "Llama": {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": L,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 24,
    }
    | COMMON,
}

# Names in TransformerLens; {} is the layer.
HOOKS = {
    "embed": "hook_embed",
    "resid.pre.{}": "blocks.{}.hook_resid_pre",
    "h.{}.ln_1.scale": "blocks.{}.ln1.hook_scale",
    "h.{}.ln_1.out": "blocks.{}.ln1.hook_out",
    "h.{}.attn.q": "blocks.{}.attn.hook_q",
    "h.{}.attn.k": "blocks.{}.attn.hook_k",
    "h.{}.attn.v": "blocks.{}.attn.hook_v",
    "h.{}.attn.scores": "blocks.{}.attn.hook_attn_scores",
    "h.{}.attn.pattern": "blocks.{}.attn.hook_pattern",
    "h.{}.attn.head_out": "blocks.{}.attn.hook_z",
    "h.{}.attn.out": "blocks.{}.hook_attn_out",
    "resid.mid.{}": "blocks.{}.hook_resid_mid",
    "h.{}.ln_2.scale": "blocks.{}.ln2.hook_scale",
    "h.{}.ln_2.out": "blocks.{}.ln2.hook_out",
    "h.{}.mlp.pre": "blocks.{}.mlp.hook_pre",
    "h.{}.mlp.post": "blocks.{}.mlp.hook_post",
    "h.{}.mlp.out": "blocks.{}.hook_mlp_out",
    "resid.post.{}": "blocks.{}.hook_resid_post",
    "ln_f.scale": "ln_final.hook_scale",
    "ln_f.out": "ln_final.hook_out",
    "logits": "unembed.hook_out",
}
OWN = {
    "GPT2": {"pos_embed": "hook_pos_embed"},
    "Llama": {
        "h.{}.attn.rot_q": "blocks.{}.attn.hook_rot_q",
        "h.{}.attn.rot_k": "blocks.{}.attn.hook_rot_k",
        "h.{}.mlp.up": "blocks.{}.mlp.hook_pre_linear",
    },
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """Return the TransformerLens model, the jaxgpt model, and the names of both."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    lens = pytest.importorskip("transformer_lens")
    from parity.families import Case

    kind = request.param
    original = Case("", kind, CASES[kind]).build(3)  # weights in which a patch has effects far above the rounding error
    folder = tmp_path_factory.mktemp("hf")
    original.save_pretrained(folder)
    config, params, _ = read_model(folder)
    lm = jaxgpt.LM(Config(model=config), params, make_tokenizer("ids", "", 0, V))
    words = Tokenizer(WordLevel({str(i): i for i in range(V)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    theirs = lens.TransformerBridge.boot_transformers(str(folder), hf_model=original, tokenizer=tokenizer)
    return theirs, lm, HOOKS | OWN[kind]


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def test_every_tap(pair):
    torch = pytest.importorskip("torch")
    theirs, lm, hooks = pair
    ids = np.random.default_rng(0).integers(0, V, (2, 9))
    with torch.no_grad():
        expected, cache = theirs.run_with_cache(torch.tensor(ids))
    out = jaxgpt.study.run(lm, ids, ["*"])
    table = {a.format(i): b.format(i) for a, b in hooks.items() for i in range(L)}
    assert set(out.taps) == set(table) == set(jaxgpt.study.names(lm))
    assert np.abs(out.logits - expected.numpy()).max() < TOLERANCE
    causal = np.tril(np.ones((9, 9), bool))
    for name, hook in table.items():
        ours = np.asarray(out.taps[name])
        wanted = cache[hook].numpy()
        if name.endswith(".scale"):  # jaxgpt multiplies, TransformerLens divides
            ours = 1 / ours
        if name.endswith(".scores"):  # masked scores are the lowest float32 here, and -inf there
            assert (ours[..., ~causal] < -1e30).all()
            ours = ours[..., causal]
            wanted = wanted[..., causal]
        ours = np.broadcast_to(ours, wanted.shape)
        assert wanted.std() > 1e-3
        assert np.abs(ours - wanted).max() < TOLERANCE, name


WORDS = "When Mary and John went to the store , John gave a drink to".split()


def test_grids_of_activation_patching(pair):
    """Indirect object identification (Wang et al. 2022): the corrupted prompt has the other name in the second position."""
    torch = pytest.importorskip("torch")
    patching = pytest.importorskip("transformer_lens.patching")
    theirs, lm, _ = pair
    vocabulary = {word: 7 + i for i, word in enumerate(dict.fromkeys(WORDS))}
    mary = vocabulary["Mary"]
    john = vocabulary["John"]
    clean = np.array([[vocabulary[word] for word in WORDS]])
    clean = np.concatenate([clean, np.where(clean == mary, john, np.where(clean == john, mary, clean))])
    corrupted = clean.copy()
    corrupted[:, WORDS.index("gave") - 1] = [mary, john]
    right = (mary, john)
    wrong = (john, mary)

    def difference(logits):
        rows = torch.arange(2)
        return (logits[rows, -1, list(right)] - logits[rows, -1, list(wrong)]).mean()

    metric = jaxgpt.study.LogitDifference(right, wrong)
    with torch.no_grad():
        _, cache = theirs.run_with_cache(torch.tensor(clean))
        for function, arguments in {
            "resid_pre": ("resid.pre",),
            "attn_out": ("attn.out",),
            "mlp_out": ("mlp.out",),
            "attn_head_out_all_pos": ("attn.head_out", "heads"),
        }.items():
            expected = getattr(patching, f"get_act_patch_{function}")(
                theirs, torch.tensor(corrupted), cache, difference
            )
            found = jaxgpt.study.patch(lm, clean, corrupted, metric, *arguments)
            assert found.grid.shape == tuple(expected.shape)
            error = np.abs(found.grid - expected.numpy()).max()
            assert error < TOLERANCE
            assert error < 1e-3 * float(expected.std())  # effects of a patch in random weights are small
