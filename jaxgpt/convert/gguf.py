"""GGUF files of llama.cpp: config, dequantized weights and tokenizer of Llama models. The header is read here, with bounds.

The format (ggml-org/ggml, docs/gguf.md), little-endian: the magic, a version, the numbers of tensors and of metadata; the
metadata, each a name, a type and a value; of each tensor its name, shape (innermost axis first), type and place; the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.config import ModelConfig, UserError
from jaxgpt.convert import llama
from jaxgpt.convert.files import Stored, Weights
from jaxgpt.convert.options import Options
from jaxgpt.data.encode import SubwordTokenizer, byte_level, call_tokenizers
from jaxgpt.data.pieces import LLAMA3, split_by
from jaxgpt.data.special import SpecialTokens
from jaxgpt.errors import short_repr

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LARGEST = 1 << 28  # entries of all metadata; vocabularies have less than a million
QUANTIZATIONS = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
CONTROL, USER_DEFINED = 3, 4  # types of tokens

# Tensors of a layer, by the names of transformers.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FREQS = "rope_freqs.weight"

# How texts are split into words, by the value of tokenizer.ggml.pre.
GPT2_WORDS = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
BYTES = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
WORDS = {
    "gpt-2": GPT2_WORDS,
    "smollm": [{"type": "Digits", "individual_digits": True}, *GPT2_WORDS],
    "llama-bpe": [split_by(LLAMA3[0]), *BYTES],
    "qwen2": [split_by(LLAMA3[1]), *BYTES],
}


class Place(NamedTuple):
    """Where a tensor's data lies in the file.

    Attributes:
        name: in the file.
        kind: of its numbers: F32, Q4_1, ...
        begin: its first byte.
        rows: number of rows.
        row_bytes: bytes of a row.
    """

    name: str
    kind: str
    begin: int
    rows: int
    row_bytes: int


class GgufWeights(Weights):
    """The tensors of a GGUF file under the names of transformers, and its metadata.

    Attributes:
        metadata: by name.
        stored: of each tensor, where it lies; also of those that no layer has.
    """

    def __init__(self, path: Path) -> None:
        """Read the header only.

        Raises:
            UserError: the gguf package is missing, or the file is cut off, malformed or quantized in an unknown way.
        """
        try:
            import gguf
        except ImportError:
            raise UserError("GGUF files need the gguf package: pip install 'jaxgpt[gguf]'") from None
        self.path, self.tensors, self._gguf = path, {}, gguf
        with path.open("rb") as f:
            self._size = f.seek(0, 2)
        self._data: np.ndarray = np.memmap(path, np.uint8, "r") if self._size else np.zeros(0, np.uint8)
        header = _Header(self._data, path)
        self.metadata = header.metadata
        self.stored: dict[str, Place] = {}
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise UserError(
                f"{path}: general.alignment must be an integer from 1 to {1 << 20:,}: {short_repr(alignment)}"
            )
        data = -(-header.at // alignment) * alignment
        types = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
        for name, shape, kind, offset in header.tensors:
            quantization = types.get(kind, str(kind))
            if quantization not in QUANTIZATIONS:
                raise UserError(
                    f"{path}: tensor {name} has the unsupported quantization {quantization}: one of "
                    f"{', '.join(QUANTIZATIONS)} is expected"
                )
            of, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            rows, width = math.prod(shape[:-1]), shape[-1] if shape else 1
            if width % of:
                raise UserError(f"{path}: tensor {name} has rows of {width}, which blocks of {of} do not divide")
            place = Place(name, quantization, data + offset, rows, width // of * size)
            if place.begin + rows * place.row_bytes > self._size:
                raise UserError(f"{path} is cut off: the data of tensor {name} ends beyond the file")
            ours = _hf_name(name)
            if ours in self.stored:
                raise UserError(f"{path}: tensor {name} is there twice")
            self.stored[ours] = place
            if ours != ROPE_FREQS:
                self.tensors[ours] = Stored(path, "F32", shape)  # as it is read
        self._heads: dict[str, int] = {}

    def unpermute(self, n_head: int, n_kv_head: int) -> None:
        """Read q and k with the two halves of each head apart, as transformers has them; llama.cpp interleaves them."""
        self._heads = {"q": n_head, "k": n_kv_head}

    def read(self, name: str) -> np.ndarray:
        """Dequantize one tensor to float32.

        Raises:
            UserError: it holds numbers that are not finite.
        """
        place = self.stored[name]
        end = place.begin + place.rows * place.row_bytes
        rows = np.array(self._data[place.begin : end]).reshape(place.rows, place.row_bytes)
        kind = self._gguf.GGMLQuantizationType[place.kind]
        shape = self.tensors[name].shape if name in self.tensors else (-1,)
        with np.errstate(all="ignore"):  # instead, numbers that are not finite are refused below
            out = np.asarray(self._gguf.quants.dequantize(rows, kind), np.float32).reshape(shape)
        if not np.isfinite(out).all():
            raise UserError(f"{self.path}: tensor {place.name} holds numbers that are not finite")
        for part, heads in self._heads.items():
            if f".self_attn.{part}_proj." in name:
                split = out.reshape(heads, out.shape[0] // heads // 2, 2, *out.shape[1:])
                out = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(out.shape)
        return out

    def same(self, one: str, other: str) -> bool:
        """Return whether two matrices hold the same numbers."""
        return self.tensors[one].shape == self.tensors[other].shape and np.array_equal(self.read(one), self.read(other))


class _Header:
    """The metadata and the list of tensors. Every length is compared with what is left of the file."""

    def __init__(self, data: np.ndarray, path: Path) -> None:
        self._data, self._path, self.at, self._entries = data, path, 0, 0
        if bytes(data[:4]) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file: it does not begin with GGUF")
        self.at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise UserError(f"{path}: GGUF version {version} is not supported: 2 or 3 is expected")
        n_tensors, n_metadata = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_metadata):
            name = self._string()
            if name in self.metadata:
                raise UserError(f"{path}: metadata {short_repr(name)} is there twice")
            self.metadata[name] = self._value(self._scalar("I"), name)
        self.tensors: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(n_tensors):
            name, axes = self._string(), self._scalar("I")
            if axes > 4:
                raise UserError(f"{path}: tensor {short_repr(name)} has {axes} axes, at most 4 are expected")
            shape = tuple(self._scalar("Q") for _ in range(axes))[::-1]
            self.tensors.append((name, shape, self._scalar("I"), self._scalar("Q")))

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise UserError(f"{self._path} is cut off, or not a GGUF file: its header ends beyond the file")
        self.at += size
        return self._data[self.at - size : self.at].tobytes()

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        try:
            return self._take(self._scalar("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self._path}: a name or text in the header is not UTF-8") from None

    def _value(self, kind: int, name: str) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise UserError(f"{self._path}: metadata {short_repr(name)} has the unknown type {kind}")
        inner, count = self._scalar("I"), self._scalar("Q")
        self._entries += count
        if self._entries > LARGEST:
            raise UserError(
                f"{self._path}: metadata {short_repr(name)} has {count:,} entries: at most {LARGEST:,} are read"
            )
        if inner == STRING:
            return [self._string() for _ in range(count)]
        if inner not in SCALARS:
            raise UserError(f"{self._path}: metadata {short_repr(name)} is an array of the unknown type {inner}")
        code = SCALARS[inner]
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))


def describe_gguf(path: Path, accept: Collection[str] = ()) -> tuple[ModelConfig, GgufWeights]:
    """Return the config of a GGUF file's model, and its weights, not read yet.

    Raises:
        UserError: another architecture than llama, or an option that is not supported; it is named.
    """
    weights = GgufWeights(path)
    kind = weights.metadata.get("general.architecture")
    if kind != "llama":
        raise UserError(f"{path}: general.architecture {short_repr(kind)} is not supported: llama is expected")
    said = {k.removeprefix("llama."): v for k, v in weights.metadata.items() if k.startswith("llama.")}
    said.pop("vocab_size", None)  # the embedding's, which may be padded, counts
    embedding = weights.tensors.get("model.embed_tokens.weight")
    values = {
        "hidden_size": said.pop("embedding_length", None),
        "intermediate_size": said.pop("feed_forward_length", None),
        "num_hidden_layers": said.pop("block_count", None),
        "num_attention_heads": said.pop("attention.head_count", None),
        "num_key_value_heads": said.pop("attention.head_count_kv", None),
        "head_dim": said.pop("attention.key_length", None),
        "max_position_embeddings": said.pop("context_length", None),
        "rms_norm_eps": said.pop("attention.layer_norm_rms_epsilon", None),
        "rope_theta": said.pop("rope.freq_base", None),
        "vocab_size": (embedding.shape[0] or None) if embedding and embedding.shape else None,
        "tie_word_embeddings": "lm_head.weight" not in weights.tensors,
        "rope_scaling": _rope_scaling(weights),
    }
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if values[name] is None:
            raise UserError(f"{path}: the metadata lacks what gives {name}: it is not a whole Llama model")
    options = Options(values | said, str(path), accept)
    model = llama.config_from_hf(options)
    options.only("rope.dimension_count", model.head_width)
    options.only("attention.value_length", model.head_width)
    options.only("rope.scaling.type", "none")
    options.only("expert_count", 0)
    options.only("expert_used_count", 0)
    options.done()
    weights.unpermute(model.n_head, model.kv_heads)
    return model, weights


def read_tokenizer(weights: GgufWeights) -> SubwordTokenizer:
    """Build the tokenizer that a GGUF file describes, with its special tokens and its chat template.

    Raises:
        UserError: a kind of tokenizer, or of splitting texts, that is not supported; it is named.
    """
    path, ggml = weights.path, "tokenizer.ggml."
    said = {k.removeprefix(ggml): v for k, v in weights.metadata.items() if k.startswith(ggml)}
    kind, words = said.get("model"), said.get("pre", "gpt-2")
    if kind != "gpt2" or words not in WORDS:
        what, expected = ("model", "gpt2") if kind != "gpt2" else ("pre", f"one of {', '.join(WORDS)}")
        found = kind if kind != "gpt2" else words
        raise UserError(
            f"{path}: {ggml}{what} {short_repr(found)} is not supported, {expected} is expected: give the model's "
            f"tokenizer.json with --tokenizer"
        )
    tokens, merges, types = (_strings(said, name, path) for name in ("tokens", "merges", "token_type"))
    if len(set(tokens)) < len(tokens) or len(types) not in (0, len(tokens)):
        raise UserError(f"{path}: {ggml}tokens has a token twice, or {ggml}token_type another length")
    pairs = [(a, b) for a, b in (merge.split(" ", 1) for merge in merges if " " in merge)]
    library = call_tokenizers(lambda: byte_level({token: i for i, token in enumerate(tokens)}, pairs), "this file")
    value = json.loads(library.to_str())
    # As llama.cpp does for this kind: it takes whole words from the vocabulary first, and begins texts with the bos token.
    value["model"]["ignore_merges"] = words == "llama-bpe"
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": WORDS[words]}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    value["added_tokens"] = [
        {"id": i, "content": tokens[i], **plain, "special": kind == CONTROL}
        for i, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    special = _special(said, tokens, weights.metadata.get("tokenizer.chat_template"), path)
    bos = special.bos_id
    if said.get("add_bos_token", words == "llama-bpe") and bos is not None:
        name = tokens[bos]
        both = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
        value["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": name, "type_id": 0}}, both[0]],
            "pair": both,
            "special_tokens": {name: {"id": name, "ids": [bos], "tokens": [name]}},
        }
    tokenizer = SubwordTokenizer(call_tokenizers(lambda: type(library).from_str(json.dumps(value)), "this file"))
    tokenizer.special = special
    return tokenizer


def _special(said: Mapping[str, Any], tokens: list[str], template: Any, path: Path) -> SpecialTokens:
    ids: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("pad", "padding"), ("unk", "unknown")):
        value = said.get(f"{theirs}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
            raise UserError(f"{path}: {theirs}_token_id must be below {len(tokens)}: {short_repr(value)}")
        if value is not None:
            ids[ours] = value
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if name != "eot"}
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if name in ids))
    generation = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return SpecialTokens(generation, named | ({"chat_template": template} if isinstance(template, str) else {}))


def _strings(said: Mapping[str, Any], name: str, path: Path) -> list[Any]:
    value = said.get(name, [])
    if not isinstance(value, list) or len({type(each) for each in value}) > 1:
        raise UserError(f"{path}: tokenizer.ggml.{name} must be an array: {short_repr(value)}")
    return value


def _rope_scaling(weights: GgufWeights) -> dict[str, Any] | None:
    """Return the scaling of Llama 3, which the file has as a divisor for each frequency.

    Raises:
        UserError: the divisors are others.
    """
    if ROPE_FREQS not in weights.stored:
        return None
    divisors = weights.read(ROPE_FREQS).reshape(-1)
    theta = weights.metadata.get("llama.rope.freq_base", 10_000.0)
    scaling = {"factor": float(divisors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wavelength = 2 * math.pi * float(theta) ** (np.arange(len(divisors)) / len(divisors))
    smooth = np.clip((8192 / wavelength - 1.0) / 3.0, 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise UserError(f"{weights.path}: tensor {ROPE_FREQS} is not supported: it is not the scaling of Llama 3")
    return scaling | {"rope_type": "llama3", "original_max_position_embeddings": 8192}


def _hf_name(name: str) -> str:
    """The name in transformers of a tensor; its own if it has none."""
    stem, _, suffix = name.rpartition(".")
    parts = stem.split(".")
    if stem in ENDS:
        return f"{ENDS[stem]}.{suffix}"
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit():
        theirs = next((hf for hf, ours in LAYER.items() if ours == parts[2]), "")
        if theirs:
            return f"model.layers.{parts[1]}.{theirs}.{suffix}"
    return name
