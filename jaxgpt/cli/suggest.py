"""Suggestions for unknown options and commands, first by the names in other programs, then by spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LIKE = 0.75  # minimum similarity, from 0 to 1, of a suggestion


class Peer(NamedTuple):
    """Names of an option in other programs.

    Attributes:
        names: without leading hyphens.
        flags: our options; those that the command has are suggested.
        otherwise: hint if the command has none of them.
    """

    names: str
    flags: str = ""
    otherwise: str = ""


PEERS = (
    # optimizer
    Peer("lr max-lr peak-lr", "--optim.learning-rate"),
    Peer("optimizer optim opt", "--optim.name"),
    Peer("wd", "--optim.weight-decay"),
    Peer("clip max-grad-norm gradient-clip-val clip-grad-norm", "--optim.grad-clip"),
    Peer("betas adam-beta1 adam-beta2", "--optim.beta1 --optim.beta2"),
    Peer("adam-epsilon epsilon", "--optim.eps"),
    Peer("warmup warmup-iters num-warmup-steps warmup-ratio", "--optim.warmup-steps"),
    Peer("lr-decay-iters", "--optim.decay-steps"),
    Peer("decay-lr lr-scheduler lr-scheduler-type lr-schedule scheduler", "--optim.schedule"),
    Peer("ema", "--optim.ema-decay"),
    # training
    Peer("max-iters max-steps iters iterations num-iters num-iterations num-steps", "--train.steps"),
    Peer("epoch epochs num-epochs max-epochs num-train-epochs", "", "set the length of training with --train.steps"),
    Peer("bs batch per-device-train-batch-size train-batch-size", "--train.batch-size"),
    Peer("micro-batch-size micro-batch microbatch-size", "--train.microbatch"),
    Peer(
        "accumulation gradient-accumulation-steps grad-accum grad-accum-steps accumulate-grad-batches accumulation-steps",
        "",
        "use --train.microbatch N, the maximum windows per device and microbatch, or -N for N microbatches",
    ),
    Peer("eval-interval eval-steps eval-freq val-every validate-every", "--train.eval-every"),
    Peer("eval-iters", "--train.eval-windows"),
    Peer("log-interval log-freq logging-steps", "--train.log-every"),
    Peer("save-every save-steps save-interval save-freq always-save-checkpoint", "--train.checkpoint-every"),
    Peer("save-total-limit keep", "--train.keep-last"),
    Peer("random-seed manual-seed", "--train.seed --seed"),
    Peer("dtype precision mixed-precision amp autocast", "--train.compute-dtype --weights"),
    Peer("bf16 bfloat16", "", "use --train.compute-dtype bfloat16"),
    Peer("fp16 half float16", "", "float16 is not supported, use --train.compute-dtype bfloat16"),
    Peer("flash flash-attn flash-attention use-flash-attention attn attn-implementation", "--train.attention"),
    Peer("gradient-checkpointing grad-checkpoint activation-checkpointing", "--train.remat"),
    Peer("compile torch-compile jit", "", "training is always compiled"),
    Peer(
        "device devices gpu gpus cuda cpu tpu accelerator platform backend",
        "",
        "JAX uses any accelerator it finds; set JAX_PLATFORMS=cpu to use the CPU",
    ),
    Peer("profile profiler", "", "jaxgpt bench shows where the time goes"),
    Peer(
        "tensorboard wandb wandb-log wandb-project logger log-dir report-to",
        "",
        "the run directory has the metrics, metrics.jsonl, and a plot, loss.png",
    ),
    # run directory, starting points
    Peer(
        "out-dir output output-dir save-dir run-dir run-name exp-name",
        "--out",
        "the directory is a positional argument",
    ),
    Peer("force", "--overwrite"),
    Peer("resume-from resume-from-checkpoint continue restore load", "--resume --checkpoint"),
    Peer("checkpoint ckpt checkpoint-dir checkpoint-path", "--checkpoint --resume"),
    Peer(
        "model model-name model-path model-name-or-path pretrained preset recipe",
        "",
        "the preset or run is the first positional argument",
    ),
    # data
    Peer("data data-dir dataset dataset-path train-data train-file", "--data.path --data.dataset"),
    Peer("corpus text-file input-file", "--data.path"),
    Peer("vocab", "--model.vocab-size"),
    Peer("split val-split val-fraction", "--data.train-fraction"),
    Peer("mixture blend data-mixture data-blend dataset-mixer dataset-weights", "--data.mix"),
    Peer("packing pack sample-packing reset-attention-mask", "--data.documents"),
    # model
    Peer("context context-length ctx ctx-len n-ctx n-positions", "--model.block-size"),
    Peer("seq-len seq-length sequence-length max-seq-len max-seq-length", "--model.block-size"),
    Peer("layers n-layers num-layers num-hidden-layers depth", "--model.n-layer"),
    Peer("heads n-heads num-heads num-attention-heads", "--model.n-head"),
    Peer("kv-heads n-kv-heads num-key-value-heads", "--model.n-kv-head"),
    Peer("dim d-model hidden-dim hidden-size embed-dim embedding-dim n-embed width", "--model.n-embd"),
    Peer("d-ff ffn-dim mlp-dim intermediate-size", "--model.n-inner"),
    Peer("pos-emb position-embedding rope", "--model.positions"),
    Peer("window", "--model.sliding-window"),
    # devices and processes
    Peer("dp ddp data-parallel", "--mesh.data"),
    Peer("zero", "--mesh.fsdp"),
    Peer("tp tensor-parallel tensor-parallel-size model-parallel", "--mesh.tensor"),
    Peer(
        "workers num-workers nnodes num-nodes nproc-per-node world-size",
        "--processes",
        "jaxgpt launch --processes N train starts several processes on this machine",
    ),
    Peer("rank local-rank node-rank", "--distributed.process-id"),
    Peer("master-addr", "--distributed.coordinator"),
    # sampling
    Peer("start input text", "--prompt"),
    Peer("num-samples n", "--num-return-sequences"),
    Peer("length max-tokens num-tokens tokens", "--max-new-tokens --max-length"),
    Peer("temp", "--temperature"),
    Peer("beyond", "--overflow"),
    Peer("greedy do-sample", "", "use --temperature 0 for greedy decoding"),
    Peer("beams beam-size", "--num-beams"),
    Peer("stop-token stop-tokens stop-sequences stop-strings eos eos-token-id", "--stop --stop-ids"),
    Peer("load-in-8bit load-in-4bit int8 quantize quantization", "--weights"),
)

# Names of our commands in other programs.
COMMANDS = {
    "generate gen complete infer inference predict prompt": "jaxgpt sample RUN --prompt TEXT",
    "talk converse ask": "jaxgpt chat RUN",
    "finetune fine-tune tune sft": "jaxgpt train finetune --init-from RUN --data.path FILE",
    "resume continue": "jaxgpt train --resume --out RUN",
    "fit pretrain run": "jaxgpt train",
    "evaluate validate val test perplexity ppl": "jaxgpt eval RUN",
    "graph curves loss": "jaxgpt plot RUN draws the losses of runs; every run directory has a loss.png",
    "list ls models configs recipes": "jaxgpt presets",
    "benchmark profile speed perf": "jaxgpt bench RUN",
    "check selftest doctor": "jaxgpt verify",
    "show summary describe stats": "jaxgpt info RUN",
    "report dataset corpus entropy": "jaxgpt data report PATH",
    "estimate memory": "jaxgpt plan PRESET --topology v5e:2x4",
    "convert": "jaxgpt import or jaxgpt export",
    "download pull fetch load": "jaxgpt import NAME RUN",
    "save": "jaxgpt export RUN DIR",
    "tokenize prepare preprocess": "jaxgpt data prepare SRC --out DIR",
    "distributed torchrun multi": "jaxgpt launch --processes N train",
    "serve server api": "there is no server; in Python, use jaxgpt.load and jaxgpt.generate",
    "version": "jaxgpt --version",
}
_COMMANDS = {name: ours for names, ours in COMMANDS.items() for name in names.split()}


def unknown_option(flag: str, known: Sequence[str], command: str) -> str:
    """Return the error message for an unknown option.

    Args:
        flag: the option, with hyphens.
        known: the command's options.
        command: its name.
    """
    see = f"see jaxgpt {command} --help"
    if not flag.startswith("--"):
        return f"unknown option {flag} (write a path that begins with a hyphen as ./{flag}); {see}"
    bare = flag[2:].rpartition(".")[2].lower()
    peer = next((peer for peer in PEERS if bare in peer.names.split()), Peer(bare))
    near = [ours for ours in peer.flags.split() if ours in known] or _of_section(bare, known)
    if not near and peer.otherwise:
        return f"unknown option {flag}: {peer.otherwise}; {see}"
    if not near:
        for ours in (flag, f"--{bare}", *peer.flags.split()):
            if others := _commands_with(ours, command):
                return f"unknown option {flag}: {ours} is an option of {others}; {see}"
    near = near or _alike(flag, bare, known)
    return f"unknown option {flag}{f' (did you mean {_either(near)}?)' if near else ''}; {see}"


def unknown_command(name: str, known: Iterable[str], presets: Iterable[str]) -> str:
    """Return the error message for an unknown command."""
    bare = name.replace("_", "-").lower()
    hint = ""
    if bare in _COMMANDS:
        ours = _COMMANDS[bare]
        hint = f"did you mean {ours}?" if ours.startswith("jaxgpt") else ours
    elif bare in presets:
        hint = f"did you mean jaxgpt train {bare}?"
    elif near := difflib.get_close_matches(bare, list(known), n=1, cutoff=LIKE):
        hint = f"did you mean {near[0]}?"
    return f"unknown command {name!r}{f' ({hint})' if hint else ''}; see jaxgpt --help"


def _of_section(bare: str, known: Sequence[str]) -> list[str]:
    """Find the options of this name in any section: `--train.steps` for `--steps`."""
    return [flag for flag in known if flag[2:].rpartition(".")[2] == bare]


def _commands_with(flag: str, but: str) -> str:
    """Name the other commands that have this option."""
    from jaxgpt.cli import COMMANDS, module_of
    from jaxgpt.cli.options import options

    others = (name for name in COMMANDS if name != but)
    return _either(
        [f"jaxgpt {name}" for name in others if any(flag in option.flags for option in options(module_of(name).Args))]
    )


def _alike(flag: str, bare: str, known: Sequence[str]) -> list[str]:
    """Find the option with the most similar spelling, with or without its section."""
    if len(flag) > 100:
        return []

    def likeness(other: str) -> float:
        last = other[2:].rpartition(".")[2]
        return max(
            difflib.SequenceMatcher(None, flag, other).ratio() if "." in flag else 0.0,
            difflib.SequenceMatcher(None, bare, last).ratio(),
        )

    best = max(known, key=likeness, default="")
    return [best] if best and likeness(best) >= LIKE else []


def _either(names: Sequence[str]) -> str:
    return " or ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])
