"""llama.cpp as a peer of benchmarks/decode.py: a GGUF file with random weights, and a server.

Needs `pip install -e '.[llamacpp]'`. The threads of llama.cpp spin while they wait: measure on an idle machine.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxgpt.config import ModelConfig

CONTEXT = 1024


def write_gguf(file: Path, config: ModelConfig, kind: str) -> None:
    """Write a GGUF file with random weights: a Llama if the config has RoPE, otherwise a GPT-2.

    Matrices and the token table are float32 or, for `int8`, Q8_0 (int8 in blocks of 32).
    """
    import gguf

    c, llama = config, config.positions == "rope"
    writer = gguf.GGUFWriter(str(file), "llama" if llama else "gpt2")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(c.n_embd)
    writer.add_feed_forward_length(c.n_inner or 4 * c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_rope_dimension_count(c.head_width)
    writer.add_layer_norm_eps(c.norm_eps)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(c.vocab_size)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(c.vocab_size - 1)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape, np.float32) * 0.02
        quantized = kind == "int8" and len(shape) == 2 and name != "position_embd.weight"
        dtype = gguf.GGMLQuantizationType.Q8_0 if quantized else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, dtype), raw_dtype=dtype)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(c.n_embd, np.float32))
        if not llama:
            writer.add_tensor(f"{name}.bias", np.zeros(c.n_embd, np.float32))

    def add_linear(name: str, inputs: int, outputs: int) -> None:
        add(f"{name}.weight", outputs, inputs)
        if c.bias:
            add(f"{name}.bias", outputs)

    D, F, kv = c.n_embd, c.n_inner or 4 * c.n_embd, c.kv_heads * c.head_width
    add("token_embd.weight", c.vocab_size, D)
    if not llama:
        add("position_embd.weight", CONTEXT, D)
    add_norm("output_norm")
    of_llama = {"attn_q": (D, D), "attn_k": (D, kv), "attn_v": (D, kv), "ffn_gate": (D, F)}
    linears = (of_llama if llama else {"attn_qkv": (D, 3 * D)}) | {
        "attn_output": (D, D),
        "ffn_up": (D, F),
        "ffn_down": (F, D),
    }
    for layer in (f"blk.{i}" for i in range(c.n_layer)):
        add_norm(f"{layer}.attn_norm")
        add_norm(f"{layer}.ffn_norm")
        for name, (inputs, outputs) in linears.items():
            add_linear(f"{layer}.{name}", inputs, outputs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A llama.cpp server in this process, with one slot per prompt."""

    def __init__(self, file: Path, batch: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = CONTEXT * batch
        params.n_parallel = batch
        params.cache_prompt = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        params.verbosity = 0
        self.server = xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], new: int) -> None:
        """Continue each prompt greedily by `new` tokens."""
        how = {"n_predict": new, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}

        def complete(ids: list[int]) -> None:
            made = self.server.handle_completions(how | {"prompt": ids})["timings"]["predicted_n"]
            assert made == new, f"{made} tokens instead of {new}"

        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(complete, prompts))
