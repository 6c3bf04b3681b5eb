"""Options of other programs: the setting of jaxgpt with the same meaning, or the alternative (docs/missing.md)."""

from __future__ import annotations

import re
from collections.abc import Collection

# Words of an option (regular expressions), and the setting with the same meaning. The first match applies.
OTHER_NAMES = (
    ("bf16|fp16|float16|amp|mixed-precision", "--train.compute-dtype bfloat16"),
    ("gradient-accumulation|grad-accum|accumulation-steps|accumulate-grad-batches", "--train.accumulation"),
    ("gradient-checkpointing|activation-checkpointing|checkpoint-activations", "--train.remat"),
    ("max-grad-norm|clip-grad-norm", "--optim.grad-clip"),
    ("per-device(-train)?-batch-size|micro-batch-size", "--train.batch-size, of all devices and microbatches together"),
    (r"^zero$|zero-?[123]|zero-(stage|optimization)|deepspeed", "--mesh.fsdp"),
    ("ddp|data-parallel", "--mesh.data"),
    ("tensor-parallel|tp", "--mesh.tensor"),
    ("expert-parallel|ep", "--mesh.expert"),
    ("(max-)?seq(uence)?-len(gth)?|context-length|max-position-embeddings", "--model.block-size"),
    ("context-parallel|cp|^sequence$|sequence-parallel(ism)?", "--mesh.context"),
    ("report-to|wandb|tensorboard", "--track"),
    ("num-generations", "--post.group"),
    ("reward-weights|reward-funcs", "--post.reward NAME=WEIGHT of each reward"),
    ("teacher", "--post.reference, with --post.objective distill or on-policy-distill"),
    ("lmbda", "--post.objective on-policy-distill for 1, distill for 0"),
    ("loss-type|^stage$", "--post.objective"),
    ("precompute-ref-log-probs?", "--post.reference-log-p once"),
    ("ref(erence)?-model", "--post.reference"),
    ("max-completion-length", "--post.max-new-tokens"),
    ("max-prompt-length", "--data.window, of the prompt and the answer together"),
    ("num-iterations", "--train.steps of the run, or --post.rollout-epochs of each rollout"),
    ("mask-truncated-completions", "--post.mask-truncated"),
    ("kl-coef(ficient)?", "--post.kl"),
    ("epsilon-high", "--post.clip-high"),
    ("rpo-alpha", "--post.sft"),
    ("simpo-gamma", "--post.margin"),
)

NO_PIPELINE = "no pipeline parallelism: shard the weights with --mesh.fsdp or --mesh.tensor"
NO_QUANTIZED_TRAINING = (
    "no training in int8 or fp8: use --train.compute-dtype bfloat16; only decoding reads int8, with --weights int8"
)
NO_QUANTIZED_BASE = "no training of quantized weights: use --lora.rank"
NO_DRAFT = "no draft model: --lookup N finds drafts in the text itself"
NO_MLA = "no multi-head latent attention: --model.n-kv-head shares keys and values"
TEXT_ONLY = "text only"
TEMPERATURE_ONE = (
    "no temperature or filters of rollouts: training draws answers at temperature 1, from the probabilities that it trains, "
    "and evaluation of rewards takes the most probable tokens"
)

# Words of an option (regular expressions), and the alternative. The first match applies.
ABSENT = (
    ("pipeline|(num|virtual)-stages|pp", NO_PIPELINE),
    (r"quanti[sz]\w*|fp8|float8|int8|fp4", NO_QUANTIZED_TRAINING),
    ("qlora|load-in-4bit|load-in-8bit|bnb", NO_QUANTIZED_BASE),
    ("elastic", "no change of machines during a run: resume it on a different mesh, docs/machines.md"),
    ("draft|assistant-model", NO_DRAFT),
    ("image|vision|audio|modality", TEXT_ONLY),
    ("mla|latent|kv-lora-rank|q-lora-rank", NO_MLA),
    ("streaming", "data are local files: prepare them once with jaxgpt data prepare"),
)

# The section of an option, its words as in `ABSENT`, and the alternative. Outside the section, the option may exist.
OF_SAMPLING = "temperature|top-p|min-p|repetition-penalty"
ABSENT_IN_SECTION = (("post", OF_SAMPLING, TEMPERATURE_ONE), ("train", OF_SAMPLING, TEMPERATURE_ONE))


def other_program(option: str, known: Collection[str] = ()) -> str:
    """Return a hint for an option of another program, such as " (here: --train.remat)", or "" for an unknown option.

    Args:
        option: an option that the command does not have, such as `--train.gradient-checkpointing`.
        known: options of the command.
    """
    section, _, last = option.lstrip("-").rpartition(".")
    if not section and "--post.objective" in known:  # for example, `jaxgpt train --temperature 0`
        section = "post"
    for words, setting in OTHER_NAMES:
        if _has(last, words):
            return f" (here: {setting})"
    of_section = [(words, instead) for place, words, instead in ABSENT_IN_SECTION if place == section]
    for words, instead in (*ABSENT, *of_section):
        if _has(last, words):
            return f" ({instead}; docs/missing.md lists missing features)"
    return ""


def _has(name: str, words: str) -> bool:
    """Return whether a name, such as `max-grad-norm`, contains the words, a regular expression, between hyphens."""
    return re.search(rf"(^|-)({words})(-|$)", name) is not None
