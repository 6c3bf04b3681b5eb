"""Small GGUF files: written as llama.cpp's converter does, and the vocabularies of their tokenizers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxgpt.config import ModelConfig
from jaxgpt.data.tokenizers.byte_level import BYTE_VOCAB

# Byte-level BPE: two special tokens, all bytes, and pairs of characters that pre-tokenizers separate differently.
CHARACTERS = "\u0120 \u010a \u010d \u0109 1 2 . ' / a B s \u00c3".split()
PAIRS = [(a, b) for a in CHARACTERS for b in CHARACTERS]
WORDS = [*PAIRS, ("1", "21"), ("aB", "aB"), ("\u0120a", "a"), ("'", "Bs")]
BPE_TOKENS = ["<|end|>", "<|start|>", *BYTE_VOCAB, *dict.fromkeys(a + b for a, b in WORDS), "<tag>", "[PAD9]"]
BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": BPE_TOKENS,
    "tokenizer.ggml.token_type": [3, 3, *[1] * (len(BPE_TOKENS) - 4), 4, 5],
    "tokenizer.ggml.merges": [f"{a} {b}" for a, b in WORDS],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}
# SentencePiece BPE: special tokens, byte tokens, and pieces; a higher score is merged first.
PIECES = (
    "\u2581 a b c 1 2 . ' ab \u2581a bc abc \u2581abc \u2581\u2581 \u2581\u2581\u2581\u2581 "
    "12 21 \u2581. '' \u00e9 \u6f22 ca cab \ufb01"
).split()
ADDED = ["<end_of_turn>", "[PAD9]", "\n\n", "   ", "<tag>"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *ADDED]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i * 7 % len(PIECES)) for i in range(len(PIECES))] + [-1000.0] * 5,
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 5, 4, 4, 4],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
# Tokenizers, and the texts whose ids llamacpp.json records.
TOKENIZERS: dict[str, dict[str, Any]] = {
    **{
        pre: BPE | {"tokenizer.ggml.pre": pre}
        for pre in "gpt-2 smollm llama-bpe dbrx qwen2 tekken deepseek-coder".split()
    },
    "spm": SPM,
    "spm-without-prefix": SPM | {"tokenizer.ggml.add_space_prefix": False},
}
TEXTS = (
    "",
    " ",
    "abc  cab ab\n\n\nab",
    " leading and trailing  ",
    "a     b\t\tc\r\n\r\n \n x",
    "12121 3.14 \u00bd\u00b2 a1 1a 1.2",
    "I'll we'Bs '' 'S don't",
    "na\u00efve caf\u00e9 e\u0301 \u201cquotes\u201d \u2026",
    "\u6f22\u5b57 \u304b\u306a \ud55c\uad6d\uc5b4 \u05d0\u05d1 \u0939\u093f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f680aB",
    "aBaB.. a/a//B\n/ ..\n",
    "<|end|> <s> </s> <0x41> <tag>x [PAD9]",
    "\u2581a\u2581\u2581 \u00a0\u3000\u200b \ufb01 \x00\x07",
)

V = 480
DENSE = ModelConfig(vocab_size=V, block_size=48, n_layer=2, n_embd=32, n_head=4)
LLAMA = replace(
    DENSE, positions="rope", norm="rmsnorm", mlp="gated", activation="silu", bias=False, n_inner=40, n_kv_head=2
)
UNTIED = replace(LLAMA, tie_embeddings=False)
LINEAR = {"rope_factor": 4.0, "rope_low_freq_factor": 48.0, "rope_high_freq_factor": 96.0, "rope_original_context": 48}
LLAMA3 = {"rope_factor": 8.0, "rope_original_context": 24, "rope_theta": 500.0, "head_dim": 16}
GEMMA = replace(
    replace(LLAMA, n_layer=7, head_dim=16, sliding_window=6, window_pattern="LLLLLG", rope_local_theta=1e4),
    norm_position="both",
    qk_norm=True,
    embed_scale=True,
    activation="gelu_new",
    rope_theta=1e6,
)
# Models by name; the part before a hyphen is the `model_type` in transformers.
MODELS = {
    "gpt2": DENSE,
    "llama": replace(UNTIED, norm_eps=1e-5),
    "mistral": replace(UNTIED, head_dim=16),
    "qwen2": replace(LLAMA, qkv_bias=True, rope_theta=1e6),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=16),
    "gpt_neox": replace(DENSE, positions="rope", rope_fraction=0.5, parallel_residual=True, tie_embeddings=False),
    "gemma3_text": GEMMA,
    "olmo2": replace(UNTIED, norm_position="output", qk_norm=True, qk_norm_per_head=False),
    "mixtral": replace(UNTIED, n_experts=4, n_inner=24),
    "qwen3_moe": replace(LLAMA, qk_norm=True, head_dim=16, n_experts=6, n_inner=24),
    "olmoe": replace(
        replace(UNTIED, n_kv_head=4, n_experts=4, n_inner=24),
        qk_norm=True,
        qk_norm_per_head=False,
        router_normalize=False,
    ),
    "gpt2-untied": replace(DENSE, tie_embeddings=False),
    "llama-biases": replace(LLAMA, bias=True),
    "llama-linear": replace(UNTIED, **LINEAR),
    "llama-3": replace(UNTIED, **LLAMA3),
    "gpt_neox-sequential": replace(DENSE, positions="rope", rope_fraction=0.25, tie_embeddings=False),
    "gemma3_text-linear": replace(GEMMA, logit_softcap=3.0, **LINEAR),
}
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_neox": "gptneox",
    "gemma3_text": "gemma3",
}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
KEYS = {
    "context_length": ("n_positions", "max_position_embeddings"),
    "block_count": ("n_layer", "num_hidden_layers"),
    "embedding_length": ("n_embd", "hidden_size"),
    "feed_forward_length": ("n_inner", "intermediate_size"),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "attention.head_count": ("n_head", "num_attention_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "use_parallel_residual": ("use_parallel_residual",),
    "rope.freq_base": ("rope_theta", "rotary_emb_base"),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}


def convert(folder: Path, path: Path, tokenizer: dict[str, Any] = BPE, **more: Any) -> None:
    """Write a GGUF file from a transformers directory, with the names and layout of llama.cpp's converter."""
    import gguf

    hf = json.loads((folder / "config.json").read_text())
    kind = hf["model_type"]
    arch = ARCHITECTURES.get(kind, kind)
    values: dict[str, Any] = {}
    for key, options in KEYS.items():
        found = [hf[name] for name in options if hf.get(name) is not None]
        if found:
            values[key] = found[0]
    rope = hf.get("rope_parameters", {})
    rope = rope.get("full_attention", rope)
    if kind == "gpt_neox":
        rotated = rope["partial_rotary_factor"] * hf["hidden_size"]
        values["rope.dimension_count"] = int(rotated // hf["num_attention_heads"])
    if kind == "gemma3_text":
        values["attention.sliding_window"] = hf["sliding_window"]
    if rope.get("rope_type") == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}

    tensors: dict[str, np.ndarray] = {}
    architectures = {name: i for i, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[arch], values["block_count"])
    for name, tensor in _joined(load_file(folder / "model.safetensors")).items():
        tensors[names.get_name(name, (".weight", ".bias"))] = _stored(hf, name, tensor)
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _divisors(rope, hf["head_dim"])

    metadata = filled(tokenizer, hf["vocab_size"])
    for key, value in (values | more).items():
        if value is not None:
            metadata[f"{arch}.{key}"] = value
    write(path, arch, metadata, tensors)


def _joined(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the matrices of the experts of a layer, in the order of their numbers."""
    joined: dict[str, Any] = {}
    for name, tensor in tensors.items():
        found = EXPERT.search(name)
        if found is None:
            joined[name] = tensor
        else:
            joined.setdefault(EXPERT.sub(".experts.", name), {})[int(found[1])] = tensor
    for name, each in joined.items():
        if isinstance(each, dict):
            joined[name] = np.stack([each[expert] for expert in range(len(each))])
    return joined


def filled(tokenizer: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Add unused tokens up to the size of the vocabulary."""
    tokens = tokenizer["tokenizer.ggml.tokens"]
    missing = range(len(tokens), vocab_size)
    more = {
        "tokens": [f"[PAD{i}]" for i in missing],
        "token_type": [5 for _ in missing],
        "scores": [-1e4 for _ in missing],
    }
    keys = {f"tokenizer.ggml.{name}": values for name, values in more.items()}
    return tokenizer | {key: tokenizer[key] + values for key, values in keys.items() if key in tokenizer}


def _stored(hf: dict[str, Any], name: str, tensor: np.ndarray) -> np.ndarray:
    """Convert a transformers tensor to the layout of GGUF files."""
    kind = hf["model_type"]
    if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    if kind in ("llama", "mistral", "mixtral") and ("q_proj" in name or "k_proj" in name):
        heads = hf["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if kind == "gpt_neox" and "query_key_value" in name:
        heads = hf["num_attention_heads"]
        return tensor.reshape(heads, 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)
    if kind == "gemma3_text" and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _divisors(rope: dict[str, Any], width: int) -> np.ndarray:
    """Return the divisors of the RoPE frequencies of Llama 3, computed one by one."""
    divisors = []
    for i in range(0, width, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / width)
        context = rope["original_max_position_embeddings"]
        smooth = (context / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def write(
    path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, Any], types: dict[str, str] | None = None
) -> None:
    """Write a GGUF file; `types` are the types of tensors that are already quantized."""
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    for name, value in metadata.items():
        if name == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            (writer.add_uint32 if value >= 0 else writer.add_int32)(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, tensor in tensors.items():
        kind = (types or {}).get(name, "F32")
        writer.add_tensor(name, np.ascontiguousarray(tensor), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
