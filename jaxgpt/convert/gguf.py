"""llama.cpp GGUF files: config, dequantized weights and tokenizer of Llama models.

The gguf package of llama.cpp reads the header and dequantizes the tensors. Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.convert import llama
from jaxgpt.convert.files import Stored, Weights
from jaxgpt.convert.options import Options
from jaxgpt.convert.rope import write_rope
from jaxgpt.convert.tensors import Format, WeightRow, matrix, norm
from jaxgpt.data.cuts import LLAMA3
from jaxgpt.data.special import SpecialTokens
from jaxgpt.data.tokenizer import SubwordTokenizer, byte_level, call_tokenizers
from jaxgpt.errors import UserError, short_repr
from jaxgpt.ops.rotary import Llama3Scaling, rope_frequencies

CONTROL, USER_DEFINED = 3, 4  # token types
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")  # supported values of tokenizer.ggml.pre
GGML = "tokenizer.ggml."
ROPE_FREQS = "rope_freqs.weight"

TABLE = (
    WeightRow("token_embd.weight", ("wte/embedding",)),
    *norm("blk.{}.attn_norm", "h_{}/ln_1"),
    *(row for x in "qkv" for row in matrix(f"blk.{{}}.attn_{x}", f"attn/{x}_proj")),
    *matrix("blk.{}.attn_output", "attn/o_proj"),
    *norm("blk.{}.ffn_norm", "h_{}/ln_2"),
    *(row for x in ("gate", "up", "down") for row in matrix(f"blk.{{}}.ffn_{x}", f"mlp/{x}_proj")),
    *norm("output_norm", "ln_f"),
    WeightRow("output.weight", ("lm_head/kernel",), output_first=True),
)
FORM = Format(TABLE, "", "token_embd.weight", "output.weight")

LLAMA = llama.LLAMA._replace(
    options={  # metadata keys without the prefix "llama."
        "vocab_size": ("vocab_size", int),
        "context_length": ("block_size", 2048),
        "block_count": ("n_layer", int),
        "attention.head_count": ("n_head", int),
        "attention.head_count_kv": ("n_kv_head", 0),
        "attention.key_length": ("head_dim", 0),
        "embedding_length": ("n_embd", int),
        "feed_forward_length": ("n_inner", int),
        "attention.layer_norm_rms_epsilon": ("norm_eps", 1e-6),
    },
    settings=llama.LLAMA.settings | {"activation": "silu"},
    only={"rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0},
)


class GgufWeights(Weights):
    """The tensors of a GGUF file, and its metadata.

    Attributes:
        metadata: dict of values, keyed by name.
        stored: dict of `gguf.ReaderTensor`, keyed by name.
        heads: dict of numbers of heads, keyed by "q" and "k". `read` reorders the rows of query and key tensors as in
            transformers: llama.cpp interleaves the two halves of each head.
    """

    def __init__(self, path: Path) -> None:
        """Read the header. Raises `UserError` for a malformed or big-endian file, or a missing gguf package."""
        try:
            import gguf
        except ImportError:
            raise UserError("GGUF files need the gguf package: pip install 'jaxgpt[gguf]'") from None

        class Reader(gguf.GGUFReader):
            """A reader that rejects a truncated file; gguf's reader returns shorter arrays."""

            def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> np.ndarray:
                array: np.ndarray = super()._get(offset, dtype, count, *order, **named)
                if len(array) < count:
                    raise ValueError("the file is truncated")
                return array

        try:
            with np.errstate(over="raise"):
                reader = Reader(path)
                self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, LookupError, ArithmeticError, RecursionError) as e:
            raise UserError(f"{path} is damaged, or not a GGUF file: {short_repr(str(e))}") from None
        if reader.byte_order != "I":
            raise UserError(f"{path} is big-endian: convert it to little-endian")
        self.path, self.stored = path, {tensor.name: tensor for tensor in reader.tensors}
        shapes = {name: tuple(tensor.shape.tolist()[::-1]) for name, tensor in self.stored.items()}
        self.tensors = {name: Stored(path, "F32", shape) for name, shape in shapes.items()}  # type after dequantizing
        self.heads: dict[str, int] = {}

    def _load(self, name: str) -> np.ndarray:
        """Dequantize one tensor to float32. Raises `UserError` if its type is not supported."""
        from gguf.quants import dequantize

        tensor = self.stored[name]
        try:
            with np.errstate(all="ignore"):  # non-finite numbers, rejected by `read`
                # Copy the data: dequantizing F32 returns its input, and weights must not share memory with the file.
                out = np.asarray(dequantize(np.array(tensor.data), tensor.tensor_type), np.float32)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise UserError(f"{self.path}: tensor {name} has unsupported type {kind}: use a Q8_0 or F16 file") from None
        for part, heads in self.heads.items():
            if f".attn_{part}." in name:
                split = out.reshape(heads, out.shape[0] // heads // 2, 2, *out.shape[1:])
                out = split.swapaxes(1, 2).reshape(out.shape)
        return out


def open_gguf(path: Path, accept: Collection[str] = ()) -> tuple[ModelConfig, GgufWeights]:
    """Return the config and the unread weights of a model; raise `UserError` for unsupported models."""
    weights = GgufWeights(path)
    kind = weights.metadata.get("general.architecture")
    if kind != "llama":
        raise UserError(
            f"{path}: general.architecture {short_repr(kind)} is not llama: import a directory of safetensors"
        )
    values = {k.removeprefix("llama."): v for k, v in weights.metadata.items() if k.startswith("llama.")}
    embedding = weights.tensors.get(FORM.tied)
    if embedding and embedding.shape and embedding.shape[0]:  # embedding possibly larger than llama.vocab_size
        values["vocab_size"] = embedding.shape[0]
    if "rope.freq_base" in values:
        values["rope_theta"] = values.pop("rope.freq_base")
    options = Options(values | _rope_scaling(weights), str(path), accept)
    model = replace(LLAMA.config_from_hf(options), tie_embeddings=FORM.head not in weights.tensors)
    options.only("rope.dimension_count", model.head_width)
    options.only("attention.value_length", model.head_width)
    options.done()
    weights.heads = {"q": model.n_head, "k": model.kv_heads}
    return model, weights


def _rope_scaling(weights: GgufWeights) -> dict[str, Any]:
    """Convert the tensor of RoPE frequency divisors to the option `rope_scaling`, and remove the tensor."""
    if ROPE_FREQS not in weights.tensors:
        return {}
    divisors, theta = weights.read(ROPE_FREQS).reshape(-1), weights.metadata.get("llama.rope.freq_base", 10_000.0)
    del weights.tensors[ROPE_FREQS]
    if type(theta) is float and divisors.size:
        scaling, width = Llama3Scaling(factor=float(divisors.max())), 2 * divisors.size
        with np.errstate(all="ignore"):
            plain, scaled = (rope_frequencies(width, theta, each) for each in (Llama3Scaling(), scaling))
            if np.allclose(divisors, plain / scaled, rtol=1e-4):
                return {"rope_scaling": write_rope(ModelConfig(rope_theta=theta, rope_factor=scaling.factor))}
    raise UserError(f"{weights.path}: {ROPE_FREQS} is not the default Llama 3 scaling: import a safetensors directory")


def read_tokenizer(weights: GgufWeights) -> SubwordTokenizer:
    """Build the tokenizer of a GGUF file, with its special tokens and its chat template.

    Raises `UserError` if the kind of tokenizer or pre-tokenizer is not supported, or the tokens are malformed.
    """
    path = weights.path
    ggml = {k.removeprefix(GGML): v for k, v in weights.metadata.items() if k.startswith(GGML)}
    kind, pre = ggml.get("model"), str(ggml.get("pre", "gpt-2"))
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise UserError(
            f"{path}: {GGML}model {short_repr(kind)} with {GGML}pre {short_repr(pre)} is not supported: expected gpt2 "
            f"with {', '.join(PRE_TOKENIZERS)}; pass the model's tokenizer.json with --tokenizer"
        )
    tokens, merges = _array(path, ggml, "tokens", str), _array(path, ggml, "merges", str)
    types = _array(path, ggml, "token_type", int)
    if not tokens or len(set(tokens)) < len(tokens) or len(types) not in (0, len(tokens)):
        raise UserError(f"{path}: no tokens or duplicate token in {GGML}tokens, or wrong length of {GGML}token_type")
    if wrong := [merge for merge in merges if " " not in merge]:
        raise UserError(f"{path}: {short_repr(wrong[0])} in {GGML}merges is not two tokens separated by a space")
    special = _special_tokens(path, ggml, tokens, weights.metadata.get("tokenizer.chat_template"))
    first = special.bos_id if ggml.get("add_bos_token", pre == "llama-bpe") else None
    library = call_tokenizers(lambda: _library_tokenizer(tokens, merges, types, pre, first), "this file")
    tokenizer = SubwordTokenizer(library)
    tokenizer.special = special
    return tokenizer


def _library_tokenizer(tokens: list[str], merges: list[str], types: list[int], pre: str, first: int | None) -> Any:
    from tokenizers import AddedToken, Regex, pre_tokenizers, processors

    pairs = [(a, b) for a, b in (merge.split(" ", 1) for merge in merges)]
    library = byte_level({token: i for i, token in enumerate(tokens)}, pairs)
    library.model.ignore_merges = pre == "llama-bpe"  # as in llama.cpp: one token for a word in the vocabulary
    if pre == "smollm":
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), library.pre_tokenizer])
    elif pre != "gpt-2":
        words = pre_tokenizers.Split(Regex(LLAMA3[0] if pre == "llama-bpe" else LLAMA3[1]), "isolated")
        characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([words, characters])
    for kind, add in ((CONTROL, library.add_special_tokens), (USER_DEFINED, library.add_tokens)):
        add([AddedToken(token, normalized=False) for token, each in zip(tokens, types, strict=False) if each == kind])
    if first is not None:
        named = [(tokens[first], first)]
        library.post_processor = processors.TemplateProcessing([tokens[first], "$A"], special_tokens=named)
    return library


def _special_tokens(path: Path, ggml: Mapping[str, Any], tokens: list[str], template: Any) -> SpecialTokens:
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding", "unk": "unknown"}
    ids = {name: ggml[key] for name, each in keys.items() if ggml.get(key := f"{each}_token_id") is not None}
    for name, i in ids.items():
        if type(i) is not int or not 0 <= i < len(tokens):
            raise UserError(f"{path}: {GGML}{keys[name]}_token_id must be an id below {len(tokens)}: {short_repr(i)}")
    generation: dict[str, Any] = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    if ends := list(dict.fromkeys(ids[name] for name in ("eos", "eot") if name in ids)):
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    names = {f"{name}_token": tokens[i] for name, i in ids.items() if name != "eot"}
    return SpecialTokens(generation, names | ({"chat_template": template} if isinstance(template, str) else {}))


def _array(path: Path, ggml: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = ggml.get(name, [])
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise UserError(f"{path}: {GGML}{name} must be an array of type {kind.__name__}: {short_repr(value)}")
    return value
