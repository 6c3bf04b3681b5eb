"""Error messages: each is one line with the value and the fix, exit code 2, and no file is written."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from folders import SMALL, TEXT, hf_folder, run_folder
from helpers import jaxgpt

from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.locks import LOCK

# Rows are COMMAND -> part of the message.
PARSER = """
train --ini -> --ini
train --Init-From x -> --Init-From
train --init-from -> --init-from requires an argument. See jaxgpt train --help.
train --init-from --resume -> --init-from requires an argument
train --optim.min-lr much -> --optim.min-lr: unable to convert "much" into float
train --model.n-layer 1.5 -> --model.n-layer must be an integer, not '1.5'
train --resume=maybe -> --resume: unable to convert "maybe" into bool
train --train.dtype x -> Unknown option: --train.dtype (settings of train: steps, epochs, batch-size,
train --data x -> Unknown option: --data (settings of data: dataset, path,
train --stepz 3 -> Unknown option: --stepz (did you mean --steps?). See jaxgpt train --help.
train --vocab-size 3 -> did you mean --model.vocab-size or --data.vocab-size
train --train.stepz=1 -> did you mean --train.steps
train --lr=1 -> Unknown option: --lr (did you mean --learning-rate?)
train -x -> -x
train --platform gpu -> Unknown option: --platform (JAX chooses the devices: set the environment variable JAX_PLATFORMS
train --mesh.pipeline 2 -> Unknown option: --mesh.pipeline (no pipeline parallelism: shard the weights with --mesh.fsdp
train --train.quantization int8 -> no training in int8 or fp8
train --mesh.sequence 2 -> Unknown option: --mesh.sequence (here: --mesh.context)
train --gradient-accumulation-steps 4 -> Unknown option: --gradient-accumulation-steps (here: --train.accumulation)
train --bf16 -> Unknown option: --bf16 (here: --train.compute-dtype bfloat16). See jaxgpt train --help.
train --temperature 0 -> Unknown option: --temperature (no temperature or filters of rollouts: training draws answers at temp
plan --top-p 0.9 -> Unknown option: --top-p (no temperature or filters of rollouts: training draws answers at temperature 1
import x --temperature 0 -> Unknown option: --temperature. See jaxgpt import --help.
sample x --draft-model y -> no draft model: --lookup N
train a b -> Unexpected argument: 'b'; an option takes one value, in quotes if it contains spaces. See jaxgpt train --help.
eval run --data.path a 'b c' d -> Unexpected argument: 'b c', 'd'; an option takes one value
sample -> Missing argument: RUN. See jaxgpt sample --help.
train --keep-optimizer -> --keep-optimizer needs the run with the optimizer state: add --init-from RUN
train --data.path '' -> --data.path is empty (an unset variable?): set it, or omit it
sample x --stop-ids 1 x -> --stop-ids must be an integer, not 'x'
sample x --weights int4 -> Did you mean "int8"
sample x --max_tokens 5 -> did you mean --max-new-tokens
eval '' -> RUN is empty
export runs/x -> Missing argument: DIRECTORY. See jaxgpt export --help.
smaple -> Did you mean "sample"
smaple --help -> Did you mean "sample"
data reprot -h -> Did you mean "report"
qwertyuiop -> Unknown command "qwertyuiop"
launch --processes 0 train -> "0" for --processes. Must be >= 1.
launch --devices-per-process -1 train -> "-1" for --devices-per-process. Must be >= 0.
launch --processes 2 -> expected train, not '': use jaxgpt launch --processes 2 train PRESET
launch --proceses 2 train -> expected train, not '--proceses'
launch sample run -> expected train, not 'sample'
launch train --train.stepz 3 -> Unknown option: --train.stepz (did you mean --train.steps?)
"""
SETTINGS = """
train --train.steps -1 -> train.steps must be at least
train --model.activation geluu -> Did you mean "gelu"
train --model.n-head 3 -> model.n_head 3 does not divide model.n_embd 128: choose a divisor or set head_dim
train --model.n-kv-head 3 -> model.n_kv_head 3 does not divide model.n_head 4: choose a divisor
train --model.no-attn-proj --model.head-dim 16 -> n_head * head_dim must equal model.n_embd 128
train --model.rope-fraction 0.01 -> rotates 0 of the 32 channels of a head: the number must be even and above 0
train statquest --model.positions sinusoidal --model.n-embd 3 -> needs an even model.n_embd, not 3
train --model.head-bias -> model.head_bias needs an untied head: set model.tie_embeddings to false
train --model.parallel-residual --model.norm-position post -> needs model.norm_position pre, output or both
train --model.rope-factor 2 --model.rope-low-freq-factor 9 -> 9.0 must be below rope_high_freq_factor 4.0
train --model.positions rope --model.head-dim 5 -> rotates 5 of the 5 channels
train --model.sliding-window 0 --model.rope-local-theta 10 -> model.rope_local_theta needs a model.sliding_window
train --model.window-pattern X -> model.window_pattern must consist of
train --model.sliding-window 0 --model.window-pattern LG -> model.window_pattern needs a model.sliding_window
train --model.n-embd 1000000 --model.n-layer 1000 -> are allowed; lower model.n_embd
train --data.stride 4 --data.documents pack -> data.stride 4 does not apply to packed documents
train --data.path a --data.mix b=1 -> data.path a and data.mix both specify the data: omit one of them
train --data.mix a=1 a=2 -> data.mix lists a twice: add up its weights
train --data.mix -> --data.mix is empty
train --data.mix a=1 @0 b=1 -> data.mix needs ascending numbers of tokens, as in @1000000: '@0'
train --data.mix a=1 @9 -> data.mix has no PATH=WEIGHT after @9: add the mixture, or omit @9
train --data.mix a=0 -> data.mix needs PATH=WEIGHT with a weight above 0, at most 1e6: 'a=0'
train --optim.spike-factor 0.5 -> optim.spike_factor must be 0 (off) or above 1, not 0.5
train --optim.min-lr 1 -> optim.min_lr 1 is above optim.learning_rate 0.004: lower it
train --train.patience 1 --train.keep-best 0 -> set train.keep_best to 1 or more
train --train.steps 9 --train.epochs 1 -> train.steps and train.epochs both set the length of the run
train --train.scan-layers --model.window-pattern LG -> needs the same sliding window in all layers
train --train.batch-size 100000000 -> token ids: at most
train --data.window 999 -> data.window 999 exceeds model.block_size 128: lower it
train --mesh.data 0 -> mesh.data must be at least 1, or -1 for all remaining devices, not 0
train --mesh.fsdp -1 --mesh.tensor -1 -> only one of mesh.fsdp and mesh.tensor can be -1
train --lora.alpha 2 -> lora.alpha needs lora.rank: add --lora.rank 8, or omit lora.alpha
train --init-from run --lora.rank 8 --lora.targets a,a -> must be distinct names separated by commas, not 'a,a'
train --init-from run --lora.rank 8 -> use --optim.name adamw
train --distributed.num-processes 2 -> need distributed.coordinator HOST:PORT
train --distributed.coordinator x -> distributed.coordinator must be HOST:PORT, auto or none, not 'x'
train --distributed.coordinator x:1 --distributed.process-id 0 -> below distributed.num_processes 0
sample run --temperature nan -> temperature must be
sample run --max-new-tokens 3000000000 -> max_new_tokens must be at least 1 and at most 16777216, not 3000000000
sample run --max-length 5 --max-new-tokens 5 -> max_length includes the prompt and cannot be combined
sample run --num-beams 2 --num-return-sequences 3 -> num_return_sequences 3 exceeds num_beams 2: lower it
sample run --num-beams 2 --early-stopping maybe -> "maybe" for --early-stopping. Choose from: "true", "false", "never"
"""
COMMANDS = """
train shakspeare -> no preset, run or file 'shakspeare' (did you mean shakespeare?)
train --model.vocab-size 5 -> model.vocab_size 5 is smaller than the tokenizer's 96
train --train.steps 1 --train.prompt Ω -> train.prompt: character 'Ω' (U+03A9, GREEK CAPITAL LETTER OMEGA) in 'Ω' is not among
train --data.path text.txt --model.block-size 100000 -> model.block_size 100000 needs at least 100001
train --data.path missing.txt -> no such file or directory: missing.txt
train --data.path empty.txt -> empty.txt is empty
train --data.path binary.dat -> binary.dat is not UTF-8 text
train --data.path odd.bin --data.tokenizer ids --model.vocab-size 9 -> odd.bin: 3 bytes
train --data.tokenizer nonsense -> no tokenizer at nonsense
train gpt2 -> no text is specified: add --data.path FILE
train --out text.txt -> cannot write to text.txt
train --out text.txt/run -> cannot write the run to text.txt/run
train --mesh.fsdp 3 -> mesh.fsdp 3 does not divide model.n_embd 128: use --mesh.data -1 --mesh.fsdp -1
bench runs/nosuch -> no preset, run or file 'runs/nosuch'; jaxgpt presets lists the presets
bench python-char --seconds 0 -> "0.0" for --seconds. Must be > 0
bench python-char --seconds nan -> "nan" for --seconds
bench python-char --mesh.tensor 3 -> mesh.tensor 3 does not divide model.n_head 4
bench python-char --model.block-size 2 -> model.block_size of at least 3, not 2: use --no-decode
chat run --json -> --json prints the answer to one message: pass the message with --once TEXT
data prepare src -> --out
data prepare --out out -> missing argument: the documents to tokenize
data prepare src more --out out -> no such file or directory: more
data prepare src --out out --shard-tokens 0 -> shard_tokens must be at least 1
data prepare src --out out --on-error ignore -> --on-error
data prepare src --out src --tokenizer bpe -> --out src is a source: choose a different --out
data prepare src --out text.txt --tokenizer bpe -> cannot write to text.txt: File exists
data prepare src --out run --tokenizer bpe -> run has files, but not from this version of jaxgpt data prepare
data report text.txt --data.path text.txt -> text.txt is the path of the data: omit --data.path and --data.mix
data report nosuch --data.path text.txt -> no preset, run, file or directory 'nosuch'; jaxgpt presets lists the presets
data report nosuch -> no preset, run, file or directory 'nosuch'; jaxgpt presets lists the presets
data report ids.bin --data.tokenizer ids -> data report needs the tokenizer of the ids: pass --data.tokenizer gpt2 or PATH
import hf new --revision x -> --revision applies to models on the Hub, but hf is a local path
import hf new --init-from run -> --init-from applies to LoRA adapters, but hf has no adapter_config.json: omit --init-from
import run new -> run is already a run: it does not need to be imported
import peft new -> peft is a LoRA adapter: pass the run of its base model
import peft new --init-from run --tokenizer gpt2 -> omit --tokenizer and --accept-option
import list new -> list/config.json: expected an object, found list
import hf new --tokenizer char -> --tokenizer char is built from a text: pass the tokenizer.json that was built from it
export run new --adapter -> run has no adapters, as it was not trained with --lora.rank: choose a different run
export run new --base x -> run has no adapters
export run new.gguf --adapter -> cannot write an adapter to a GGUF file: new.gguf; choose a directory, or omit --adapter
export run new.gguf --dtype bfloat16 -> --dtype bfloat16 needs a directory: choose the type of a GGUF file with --type
export run new --adapter --type q8_0 -> --type q8_0 needs a GGUF file: choose a name that ends in .gguf, or omit --type
export run new --type q8_0 -> --type q8_0 needs a GGUF file: choose a name that ends in .gguf, or omit --type
data report short.txt --data.train-fraction 1.0 -> 2 training and 0 validation tokens are too few
inspect run --max-new-tokens 900 -> exceed the limit of
inspect run --max-new-tokens 2 --html no/a.html -> no/a.html
plan -> Missing argument: TARGET. See jaxgpt plan --help.
plan python-char -> --topology requires an argument
plan python-char --topology v9:2x4 -> unknown chip 'v9'
plan python-char --topology v5e:2x4 --mesh.data 3 -> use --mesh.data -1
plan python-char --topology v5e:2x4 --mesh.tensor 8 -> 4: use --mesh.data -1 --mesh.fsdp -1 --mesh.tensor 1
plan python-char --topology v5e:2x4 --mesh.fsdp 16 -> needs 16 devices (fsdp 16), but only 8 exist
plan shakespeare --topology v5e:1 --train.epochs 1 -> train.epochs 1 needs the number of tokens, which plan does not count
plan shakespeare --topology a100:1 --decode -> --decode needs the compiler:
plot -> missing argument: the runs to draw, as in jaxgpt plot runs/shakespeare
plot run --out a.gif -> --out a.gif must end in .png, .svg or .pdf
plot runn --follow -> no run at runn (did you mean run?)
follow run --to tensorbord -> unknown tracker 'tensorbord' (did you mean tensorboard?): choose from tensorboard, wandb, mlflow
follow run --to tensorboard -> run has no metrics.jsonl: it was imported or saved from Python; choose a trained run
compare run -> missing arguments: two or more runs, as in jaxgpt compare runs/a runs/b
compare run run -> run has no metrics.jsonl: it was imported or saved from Python; choose a trained run
compare run runn -> no run at runn (did you mean run?)
follow run -> --to requires an argument
train --track nosuch -> unknown tracker 'nosuch': choose from tensorboard, wandb, mlflow, trackio
plot runn -> no run at runn (did you mean run?)
plot run -> run has no metrics.jsonl: it was imported or saved from Python; choose a trained run
sample run --stream --json -> --stream prints one sample: pass one --prompt, without --json
sample run --prompt "question question" -> 17 tokens
sample run --prompt aZ -> character 'Z'
sample run --num-beams 2 --temperature 1 -> temperature 1.0 has no effect in beam search
sample run --check-memorized -> --check-memorized does not apply to run: the run has no record of its training data
"""
RUNS = """
info hf -> hf is a model of a different library, not a run: use jaxgpt import hf RUN
info peft -> use jaxgpt import peft RUN --init-from BASE
info . -> . is not a run: it has no config.json
info taken -> taken is not a run: it has no tokenizer.json (expected: config.json, tokenizer.json, checkpoints)
import folder new -> cannot read folder/config.json: it is not a file
info lost -> lost/checkpoints is missing: restore it, or start again from step 0: jaxgpt train lost/config.json
eval runn -> no run at runn (did you mean run?): expected a run directory, as written by `jaxgpt train`
eval run --checkpoint 7 -> no checkpoint '7' in run/checkpoints: use best, last or one of 0
eval run --post.reward exact -> --post.reward has no effect on run, a run with post.objective next-token: omit it
eval run --tasks hellaswag --post.reward exact -> --post.reward has no effect with --tasks: omit it
export run new.gguf --shard-size 1GB -> --shard-size has no effect on a GGUF file, which is a single file: omit it
export run new --adapter --shard-size 1GB -> --shard-size has no effect on an adapter, which is a single file: omit it
eval empty -> no complete checkpoint in empty/checkpoints: training saves at evaluations and when it stops
eval damaged --checkpoint 0 -> checkpoint.json has changed since it was written; restore it
eval damaged -> damaged/checkpoints/0/checkpoint.json is damaged: restore it, or choose a step with --checkpoint
eval other -> other/checkpoints/0 is damaged or does not match the settings: params (
chat run --once '' -> --once is empty (an unset variable?): set it, or omit it
inspect run --html nowhere/a.html -> cannot write nowhere/a.html: No such file or directory
inspect run --html src -> cannot write src: it is a directory; choose a different name
plot run --out nowhere/a.png -> cannot write nowhere/a.png: No such file or directory
train run -> run is a run: repeat its settings with --out NEW, or resume it with --resume
train run --out run -> holds a run: resume it with --resume, or replace it with --overwrite (in Python: overwrite=True)
train --data.path text.txt --out stray -> stray holds checkpoints but no config.json: restore it, or choose a different path
train --resume --out stray -> stray is not a run: it has no config.json
train --data.path text.txt --out 'a [b]' -> cannot store a run at a [b]: Orbax reads '[' as a pattern: use a different path
train --data.path text.txt --out gs://bucket/run -> are ordinary files; mount the bucket as a directory (Cloud Storage: gcsfuse
train --resume -> --resume needs a run directory: jaxgpt train --resume --out DIR
train --resume --out run --overwrite -> --resume and --overwrite are mutually exclusive: omit one of them
train --resume --out nowhere -> no run at nowhere
train run --resume --out hf -> --resume continues one run, not both run and --out hf: omit one of them
train gpt2 --resume --out run -> run is a run of 'test', not 'gpt2': omit the preset, or change --out
train --resume --out run --init-from hf -> run started from random weights; omit it, or start a new run
train --resume --out run --lora.rank 8 -> start a new run: jaxgpt train finetune --init-from run --lora.rank 8
train --resume --out run --model.n-layer 9 -> a resumed run keeps model.n_layer: 2, not 9; omit it, or start a new
train --resume --out run -> train it in a new run: jaxgpt train finetune --init-from run --data.path PATH
train --lora.rank 8 -> --lora.rank needs the weights of a run: add --init-from RUN
train finetune --data.path text.txt -> finetune needs the weights of a run: add --init-from RUN
train finetune --init-from nowhere --data.path text.txt -> no run at nowhere
train finetune --init-from peft --data.path text.txt -> use jaxgpt import peft RUN --init-from BASE
train finetune --init-from run --model.n-layer 7 -> model.n_layer must be 2, as in the run of --init-from, not 7
train finetune --init-from run --model.block-size 64 -> to train on shorter windows, use --data.window
train shakespeare --init-from run --data.tokenizer byte -> as in the run of --init-from, not 'byte': omit it
train finetune --init-from run --data.tokenizer byte -> not 'byte': omit it
train finetune --init-from run --data.path text.txt --out run --overwrite -> would delete the weights to start from
"""
FILES = [
    ('{"modle": {}}', "Config has no setting 'modle' (did you mean model?)"),
    ('{"optim": {"lr": 1}}', "OptimConfig has no setting 'lr' (did you mean learning_rate?)"),
    ('{"model": {"n_layer": true}}', "model.n_layer must be an integer, not True"),
    ('{"train": {"steps": "9"}}', "train.steps must be an integer, not '9'"),
    ('{"optim": {"name": "adam"}}', "optim.name must be one of adamw, "),
    ('{"preset": 1}', "config.preset must be of type str, not 1"),
    ('{"data": {"mix": [1]}}', "data.mix must be a list of strings, not (1,)"),
    ('{"preset": "a\\u0000"}', "config.preset 'a\\x00' contains a NUL or an unpaired surrogate"),
    ('{"train": []}', "train: expected an object, found list"),
    ("[]", "expected an object, found list"),
    ("{", "not valid JSON (Expecting property name"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with runs, models and texts."""
    place = tmp_path_factory.mktemp("place")
    run = run_folder(place / "run", SMALL)
    for name in ("lost", "empty", "damaged", "other"):
        shutil.copytree(run, place / name)
    shutil.rmtree(place / "lost/checkpoints")
    shutil.rmtree(place / "empty/checkpoints/0")
    (place / "damaged/checkpoints/0/checkpoint.json").write_text("{}")
    config = Run(run).config()
    tokenizer = Run(run).tokenizer()
    write_settings(Run(place / "other"), config.with_model(n_embd=16), tokenizer)
    hf = hf_folder(place / "hf")
    for name in ("folder", "list", "peft"):
        shutil.copytree(hf, place / name)
    (place / "folder/config.json").unlink()
    (place / "folder/config.json").mkdir()
    (place / "list/config.json").write_text("[]")
    (place / "peft/adapter_config.json").write_text("{}")
    for name in ("src", "taken", "stray/checkpoints"):
        (place / name).mkdir(parents=True)
    (place / "taken/config.json").write_text("{}")
    for name in ("text.txt", "src/a.txt"):
        (place / name).write_text(TEXT * 400)
    (place / "empty.txt").touch()
    (place / "short.txt").write_text("ab")
    (place / "binary.dat").write_bytes(b"\xff\xfe\x00\x01")
    (place / "odd.bin").write_bytes(b"123")
    np.zeros(400, "<u2").tofile(place / "ids.bin")
    return place


def contents(place: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.stat().st_mtime_ns) for path in place.rglob("*") if path.is_file() and path.name != LOCK)


@pytest.mark.parametrize("row", [*filter(None, (PARSER + SETTINGS + COMMANDS + RUNS).splitlines())])
def test_an_error_is_one_line(row: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, message = row.split(" -> ")
    monkeypatch.chdir(place)
    before = contents(place)
    result = jaxgpt(*shlex.split(command))
    assert (result.code, result.out) == (2, ""), result.err
    assert message in result.err.splitlines()[-1]
    assert command == "train run --out run" or result.err.count("\n") == 1
    assert contents(place) == before


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_file_of_settings(text: str, message: str) -> None:
    Path("settings.json").write_text(text)
    result = jaxgpt("train", "settings.json")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("jaxgpt: settings.json")
    assert message in result.err
