"""Small models of the transformers families: the comparison, and the measured differences.

`python tests/parity/families.py` prints the table of docs/models.md.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

import jaxgpt
from jaxgpt.convert.export_model import export_model
from jaxgpt.convert.import_model import import_model
from jaxgpt.convert.open_model import read_model
from jaxgpt.convert.tensor_layout import to_tensor
from jaxgpt.convert.tensors import expand
from jaxgpt.model import GPT
from jaxgpt.model.params import flatten_params
from jaxgpt.train.loss import cross_entropy

V = 97
LENGTH = 80
NEW = 64
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NEOX = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
GEMMA = SMALL | {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


class Case(NamedTuple):
    """A model of a family.

    Attributes:
        family: name in the table.
        name: prefix of the transformers classes, without `Config` and `ForCausalLM`.
        options: options of its config.
    """

    family: str
    name: str
    options: dict[str, Any]

    def build(self, seed: int = 0) -> Any:
        """Return the model with random weights."""
        prefix = {"Gemma3": "Gemma3Text"}.get(self.name, self.name)
        head = {"GPT2": "GPT2LMHeadModel"}.get(self.name, f"{self.name}ForCausalLM")
        config = getattr(transformers, f"{prefix}Config")(**self.options)
        config._attn_implementation = "eager"
        model = getattr(transformers, head)(config).eval()
        randomize(model, seed)
        return model


def randomize(model: Any, seed: int = 0) -> None:
    """Replace all parameters with random ones: gains around 1, all others around 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        gain = ("norm" in name or "ln_" in name) and name.endswith("weight") and "Gemma3" not in type(model).__name__
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15 + float(gain)


NO_IDS = {"bos_token_id": None, "eos_token_id": None}
GPT2 = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": V} | NO_IDS
CASES = {
    "gpt2": Case("GPT-2", "GPT2", GPT2),
    "llama": Case("Llama", "Llama", SMALL),
    "mistral": Case("Mistral", "Mistral", SMALL | {"sliding_window": 9, "head_dim": 16}),
    "qwen2": Case("Qwen2, Qwen2.5", "Qwen2", SMALL | {"tie_word_embeddings": True, "max_window_layers": 2}),
    "qwen3": Case("Qwen3", "Qwen3", SMALL | {"head_dim": 16, "max_window_layers": 2}),
    "gpt_neox": Case("GPT-NeoX, Pythia", "GPTNeoX", NEOX | {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "gemma3_text": Case("Gemma 3, text", "Gemma3", GEMMA),
    "olmo2": Case("OLMo 2", "Olmo2", SMALL),
    "mixtral": Case("Mixtral", "Mixtral", SMALL | EXPERTS | {"num_local_experts": 4}),
    "qwen3_moe": Case(
        "Qwen3-MoE",
        "Qwen3Moe",
        SMALL
        | EXPERTS
        | {
            "num_experts": 6,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": Case("OLMoE", "Olmoe", SMALL | EXPERTS | {"num_experts": 6}),
}
VARIANTS = {
    "mistral-global": Case("", "Mistral", SMALL | {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2-windows": Case(
        "", "Qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen2-head": Case("", "Qwen2", SMALL | {"max_window_layers": 2, "head_dim": 16, "rope_parameters": LINEAR}),
    "qwen3-layers": Case(
        "",
        "Qwen3",
        SMALL
        | {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt_neox-sequential": Case(
        "", "GPTNeoX", NEOX | {"use_parallel_residual": False, "tie_word_embeddings": True, "hidden_act": "gelu_new"}
    ),
    "gemma3-other": Case(
        "",
        "Gemma3",
        GEMMA
        | {
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e3, "original_max_position_embeddings": 16},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "olmo2-tied": Case("", "Olmo2", SMALL | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}


class Measured(NamedTuple):
    """Differences between a model in jaxgpt and in transformers.

    Attributes:
        logits: largest difference of a logit.
        spread: standard deviation of the logits.
        gradients: largest difference of a gradient, relative to the largest gradient of its tensor.
        equal_tokens: tokens of greedy texts that are equal.
        tokens: tokens of greedy texts.
        exported: largest difference of a logit of the exported model in transformers.
        weights: largest difference of a weight that was imported and exported.
        config: options of the exported config.json, as transformers reads it, that differ.
    """

    logits: float
    spread: float
    gradients: float
    equal_tokens: int
    tokens: int
    exported: float
    weights: float
    config: list[str]


def measure(case: Case, folder: Path) -> Measured:
    """Compare a model with its import, and with the export of the import."""
    theirs = case.build()
    hf = folder / "hf"
    run = folder / "run"
    back = folder / "back"
    theirs.save_pretrained(hf)
    import_model(hf, run, tokenizer="ids")
    export_model(run, back)
    lm = jaxgpt.load(run)
    ids_BT = np.random.default_rng(1).integers(0, V, (2, LENGTH))
    difference, spread, worst = compare(theirs, lm.config.model, lm.params, read_model(hf)[2], ids_BT)
    prompts = ids_BT[:, : LENGTH - NEW]
    with torch.no_grad():
        greedy = theirs.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(prompts.shape, dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
    texts = jaxgpt.generate(lm, [row.tolist() for row in prompts], max_new_tokens=NEW, temperature=0)
    equal = np.array([text.ids for text in texts]) == greedy.numpy()[:, prompts.shape[1] :]

    with torch.no_grad():
        again = transformers.AutoModelForCausalLM.from_pretrained(back, attn_implementation="eager").eval()
        exported = (again(torch.tensor(ids_BT)).logits - theirs(torch.tensor(ids_BT)).logits).abs().max()
    one = load_file(hf / "model.safetensors")
    two = load_file(back / "model.safetensors")
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    weights = max(float(np.abs(one[name] - two[name]).max()) for name in one)
    a, b = (transformers.AutoConfig.from_pretrained(path).to_dict() for path in (hf, back))
    # Sizes that follow from others may be written out.
    names = sorted({*a, *b} - {"_name_or_path"} - {name for name in ("head_dim", "n_inner") if a.get(name) is None})
    differ = [f"{name}: {a.get(name)} -> {b.get(name)}" for name in names if a.get(name) != b.get(name)]
    return Measured(difference, spread, worst, int(equal.sum()), equal.size, float(exported), weights, differ)


def compare(theirs: Any, config: Any, params: Any, form: Any, ids_BT: np.ndarray) -> tuple[float, float, float]:
    """Return `logits`, `spread` and `gradients` of `Measured`."""
    with jax.default_matmul_precision("highest"):
        logits, grads = _logits_and_gradients(config)(params, jnp.asarray(ids_BT, jnp.int32))
    theirs.zero_grad()
    out = theirs(torch.tensor(ids_BT)).logits
    torch.nn.functional.cross_entropy(out[:, :-1].reshape(-1, V), torch.tensor(ids_BT[:, 1:]).reshape(-1)).backward()
    mine = flatten_params(jax.device_get(grads))
    worst = 0.0
    expected = gradients_by_file_name(theirs)
    for row in expand(form.table, config):
        # The offset does not change the gradient.
        layout = row.layout._replace(offset=0.0, factor=1 / row.layout.factor)
        parts = {leaf: mine[leaf] if row.expert < 0 else mine[leaf][row.expert] for leaf in row.leaves}
        slope = to_tensor(row._replace(layout=layout), parts)
        other = expected[row.name]
        # The bias of the keys shifts all scores of a query equally, so its gradient is zero except for rounding.
        worst = max(worst, float(np.abs(slope - other).max() / max(np.abs(other).max(), 1e-4)))
    scores = out.detach().numpy()
    return float(np.abs(np.asarray(logits) - scores).max()), float(scores.std()), worst


def gradients_by_file_name(theirs: Any) -> dict[str, np.ndarray]:
    """Return the gradients of a model in transformers, by the names of the tensors in its files."""
    found = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    if "lm_head.weight" in found:
        found["embed_out.weight"] = found["lm_head.weight"]  # in files of GPT-NeoX
    for name in [name for name in found if ".mlp.experts." in name or ".mlp.gate." in name]:
        gradient = found.pop(name)
        if type(theirs).__name__.startswith("Mixtral"):
            name = name.replace(".mlp.", ".block_sparse_moe.")
            parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
        else:
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        base, _, last = name.rpartition(".")
        if last == "weight":  # the router
            found[name] = gradient
            continue
        # Memory holds the experts in one tensor, [E, out, in], with gates above the other outputs.
        for part, stack in zip(parts[last], np.split(gradient, len(parts[last]), axis=1), strict=True):
            for expert, one in enumerate(stack):
                found[f"{base}.{expert}.{part}.weight"] = one
    return found


@functools.cache
def _logits_and_gradients(config: Any) -> Any:
    def loss(params: Any, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTV = GPT(config).apply({"params": params}, ids_BT)
        return cross_entropy(logits_BTV[:, :-1], ids_BT[:, 1:]).mean(), logits_BTV

    def both(params: Any, ids_BT: jax.Array) -> tuple[jax.Array, Any]:
        grads, logits_BTV = jax.grad(loss, has_aux=True)(params, ids_BT)
        return logits_BTV, grads

    return jax.jit(both)


def main() -> None:
    """Print the table of docs/models.md; with --json, all measurements."""
    measured = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = measure(case, Path(folder))
    if "--json" in sys.argv:
        print(json.dumps({name: m._asdict() for name, m in measured.items()}))
        return
    print("| family | `model_type` | logits | gradients | greedy tokens equal | weights after import and export |")
    print("|---|---|---|---|---|---|")
    for name, m in measured.items():
        weights = "equal" if m.weights == 0 else f"{m.weights:.0e}"
        equal = f"{m.equal_tokens} of {m.tokens}"
        print(f"| {CASES[name].family} | `{name}` | {m.logits:.0e} | {m.gradients:.0e} | {equal} | {weights} |")


if __name__ == "__main__":
    main()
