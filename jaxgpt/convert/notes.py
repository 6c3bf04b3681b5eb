"""The four small decoders of the study notes: tables between their weights and ours, for `tensors.from_arrays`.

| preset | original |
|---|---|
| numpy-minimal | NumPy, matrices (in, out); neither embedding nor head |
| torch-decoder | `nn.TransformerEncoderLayer` under a causal mask |
| gpt2-style | `nn.MultiheadAttention`, `nn.LayerNorm`, `nn.Linear` |
| statquest | `nn.Embedding` and four `nn.Linear` |
"""

from __future__ import annotations

from jaxgpt.convert.tensors import Table, Tensor

_QKV = tuple(f"h_{{}}/attn/{q}_proj/kernel" for q in "qkv")


def _linear(name: str, *leaves: str, n_in: int = 1) -> Table:
    return (
        Tensor(f"{name}.weight", tuple(f"{leaf}/kernel" for leaf in leaves), n_in, output_first=True),
        Tensor(f"{name}.bias", tuple(f"{leaf}/bias" for leaf in leaves)),
    )


def _norm(name: str, leaf: str) -> Table:
    return Tensor(f"{name}.weight", (f"{leaf}/scale",)), Tensor(f"{name}.bias", (f"{leaf}/bias",))


def _multihead(name: str) -> Table:
    """torch's MultiheadAttention packs q, k and v as GPT-2 does, output first, under names of its own."""
    return (
        Tensor(f"{name}.in_proj_weight", _QKV, 1, output_first=True),
        Tensor(f"{name}.in_proj_bias", tuple(leaf.replace("kernel", "bias") for leaf in _QKV)),
        *_linear(f"{name}.out_proj", "h_{}/attn/o_proj", n_in=2),
    )


NUMPY_MINIMAL: Table = (
    *(Tensor(f"layers.{{}}.W{q}", (f"h_{{}}/attn/{q}_proj/kernel",), 1) for q in "qkv"),
    Tensor("layers.{}.W1", ("h_{}/mlp/up_proj/kernel",), 1),
    Tensor("layers.{}.W2", ("h_{}/mlp/down_proj/kernel",), 1),
)

TORCH_DECODER: Table = (
    Tensor("embedding.weight", ("wte/embedding",), 1),
    *_multihead("layers.{}.self_attn"),
    *_norm("layers.{}.norm1", "h_{}/ln_1"),
    *_linear("layers.{}.linear1", "h_{}/mlp/up_proj"),
    *_linear("layers.{}.linear2", "h_{}/mlp/down_proj"),
    *_norm("layers.{}.norm2", "h_{}/ln_2"),
    *_norm("norm", "ln_f"),
    *_linear("head", "lm_head"),
)

GPT2_STYLE: Table = (
    Tensor("wte.weight", ("wte/embedding",), 1),
    Tensor("wpe.weight", ("wpe/embedding",), 1),
    *_norm("blocks.{}.ln_1", "h_{}/ln_1"),
    *_multihead("blocks.{}.attn"),
    *_norm("blocks.{}.ln_2", "h_{}/ln_2"),
    *_linear("blocks.{}.c_fc", "h_{}/mlp/up_proj"),
    *_linear("blocks.{}.c_proj", "h_{}/mlp/down_proj"),
    *_norm("ln_f", "ln_f"),
    *_linear("head", "lm_head"),
)

STATQUEST: Table = (
    Tensor("we.weight", ("wte/embedding",), 1),
    *(Tensor(f"W_{q}.weight", (f"h_0/attn/{q}_proj/kernel",), 1, output_first=True) for q in "qkv"),
    *_linear("fc_layer", "lm_head"),
)
