"""llama.cpp as a peer of benchmarks/decode.py: a GGUF file with random weights, and a server.

Needs `pip install xllamacpp gguf`. The threads of llama.cpp spin while they wait: measure on a quiet machine.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

VOCAB, CONTEXT = 50257, 1024


def write_gpt2(file: Path, layers: int, heads: int, width: int, kind: str) -> None:
    """Write a GPT-2 with random weights as a GGUF file.

    The matrices are float32 or, for `int8`, Q8_0 (int8 in blocks of 32).
    """
    import gguf

    writer = gguf.GGUFWriter(str(file), "gpt2")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(4 * width)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(VOCAB - 1)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape, np.float32) * 0.02
        quantized = kind == "int8" and len(shape) == 2 and name != "position_embd.weight"
        dtype = gguf.GGMLQuantizationType.Q8_0 if quantized else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, dtype), raw_dtype=dtype)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(width, np.float32))

    def add_linear(name: str, inputs: int, outputs: int) -> None:
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs)

    add("token_embd.weight", VOCAB, width)
    add("position_embd.weight", CONTEXT, width)
    add_norm("output_norm")
    for layer in (f"blk.{i}" for i in range(layers)):
        add_norm(f"{layer}.attn_norm")
        add_norm(f"{layer}.ffn_norm")
        add_linear(f"{layer}.attn_qkv", width, 3 * width)
        add_linear(f"{layer}.attn_output", width, width)
        add_linear(f"{layer}.ffn_up", width, 4 * width)
        add_linear(f"{layer}.ffn_down", 4 * width, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A llama.cpp server in this process, with one slot per text."""

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
