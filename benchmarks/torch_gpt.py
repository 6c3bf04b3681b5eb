"""GPT-2 in plain PyTorch, optimized for speed: the baseline of the training benchmarks."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


def put(batch: torch.Tensor, device: str) -> torch.Tensor:
    """Copy a batch to a GPU from pinned memory, without blocking on previous steps; CPU: no copy."""
    return batch.pin_memory().to(device, non_blocking=True) if device == "cuda" else batch


class Block(nn.Module):
    """A pre-norm block with fused causal attention: `x + attn(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, width: int, heads: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        q, k, v = (
            t.view(B, T, self.heads, D // self.heads).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(D, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + functional.dropout(self.out(y.transpose(1, 2).reshape(B, T, D)), rate)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.ln_2(x)))), rate)


class TorchGPT(nn.Module):
    """GPT-2: token and position embeddings, blocks, the final norm, and the tied output head."""

    def __init__(
        self, vocab: int, context: int, layers: int, heads: int, width: int, bias: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=bias)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        x = functional.dropout(x, self.dropout if self.training else 0.0)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.ln_f(x), self.wte.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
