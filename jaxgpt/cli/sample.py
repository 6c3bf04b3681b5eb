"""jaxgpt sample RUN --prompt TEXT"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxgpt.cli.parse import Command, note, print_json
from jaxgpt.cli.progress import progress
from jaxgpt.config import SEED, BeamParams, MeshConfig, Overflow, SamplingParams, UserError, settings_of
from jaxgpt.errors import as_int

if TYPE_CHECKING:
    from jaxgpt.data import Data, Tokenizer
    from jaxgpt.data.text import Progress
    from jaxgpt.lm import LM, Generation
    from jaxgpt.report.memorized import Memorized

COMMAND = Command(
    "sample",
    "RUN",
    "Generate text from a run.",
    [
        "jaxgpt sample runs/shakespeare --prompt ROMEO: --max-new-tokens 500",
        "jaxgpt sample runs/shakespeare --prompt ROMEO: --temperature 0 --stream",
        "jaxgpt sample runs/shakespeare --prompts-file prompts.txt --num-return-sequences 3 --json",
        "jaxgpt sample runs/shakespeare --prompt ROMEO: --check-memorized",
    ],
)


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    prompt: str = ""  # text to continue; empty: start a new text
    special: bool = False  # encode names of special tokens in the prompt, such as <|im_end|>, as their ids
    prompts_file: str = ""  # file with one prompt per line, instead of --prompt
    max_new_tokens: int | None = None  # maximum number of new tokens (default: 200, or what fits the context)
    max_length: int | None = None  # maximum number of tokens including the prompt, instead of --max-new-tokens


@dataclass(frozen=True, kw_only=True)
class _Stop:
    stop: tuple[str, ...] = ()  # stop strings: end the sample before the first of these
    stop_ids: tuple[int, ...] = ()  # stop ids: end the sample before the first of these
    # when the text exceeds the context: error, or slide the window; with error, models with RoPE continue
    overflow: Overflow = "error"
    # faster decoding of one text that repeats itself or its prompt: draft what followed the last N tokens earlier (0: off)
    lookup: int = 0


@dataclass(frozen=True, kw_only=True)
class Args(_Stop, BeamParams, SamplingParams, _Prompt):
    # stop beam search at num_beams finished texts (true), or when a better text is unlikely (false) or impossible (never)
    early_stopping: Literal["true", "false", "never"] = "false"
    seed: int = SEED  # random seed
    stream: bool = False  # print the text as it is generated
    weights: Literal["float32", "bfloat16", "int8"] = "float32"  # precision of the weights in memory
    checkpoint: str = "best"  # checkpoint to load: best (lowest validation loss), last, or a step
    check_memorized: bool = False  # find the longest span of each sample that occurs verbatim in the training data
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [target], parsed = COMMAND.parse(Args, args)
    prompts = _prompts(parsed)
    settings = _settings(parsed)
    if parsed.stream and (parsed.json or parsed.num_beams > 1 or len(prompts) * parsed.num_return_sequences > 1):
        raise UserError(
            "--stream prints a single sample: leave out --json, --num-beams, --num-return-sequences and further prompts"
        )

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    from jaxgpt.lm import generate, load
    from jaxgpt.prompts import encode_prompts

    with progress("loading") as activity:
        lm = load(target, parsed.checkpoint, parsed.weights)
        if parsed.check_memorized:
            activity.stage("tokenizing")
            data = _training_data(lm, target, parsed.checkpoint, activity)
    for number, line in enumerate(prompts if parsed.prompts_file else (), 1):
        try:
            lm.tokenizer.encode(line)
        except UserError as e:
            raise UserError(f"{parsed.prompts_file}: line {number}: {e}") from None
    say_where_it_begins(lm.tokenizer, prompts)
    inputs: list[Any] = list(prompts)
    if parsed.special:
        encoded = encode_prompts(lm.tokenizer, lm.config.model.vocab_size, prompts, special=True)
        inputs = [each.ids if each.text_ids else "" for each in encoded]
    if parsed.stream:
        out = _stream(lm, prompts[0], inputs[0], settings)
        if parsed.check_memorized:
            _print_memorized(*_memorized(lm, data, [out]))
        return 0
    began = time.perf_counter()
    beams = settings_of(BeamParams, parsed)
    with progress("sampling") as activity:
        outs = generate(lm, inputs, **settings, **asdict(beams), progress=activity)
    seconds = time.perf_counter() - began
    repeated = [prompt for prompt in prompts for _ in range(parsed.num_return_sequences)]
    for number, out in enumerate(outs, 1):
        _note_exhausted(out, f"sample {number}" if len(outs) > 1 else "the sample", parsed.no_repeat_ngram_size)
    if parsed.json:
        rows = [{"prompt": p} | out._asdict() for p, out in zip(repeated, outs, strict=True)]
        results: dict[str, Any] = {"run": target, "samples": rows, "seconds": seconds}
        if parsed.check_memorized:
            spans, validation = _memorized(lm, data, outs)
            results["samples"] = [row | {"memorized": asdict(s)} for row, s in zip(rows, spans, strict=True)]
            results["validation_tokens"] = validation
        print_json(results)
        return 0
    for number, (prompt, out) in enumerate(zip(repeated, outs, strict=True)):
        if number:
            print("---")
        print(prompt + out.text)
    if parsed.check_memorized:
        _print_memorized(*_memorized(lm, data, outs))
    return 0


def check_seed(seed: int) -> None:
    """Check that a seed is in range."""
    as_int("seed", seed, 0, 2**32 - 1)


def say_where_it_begins(tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
    """Print a note if a prompt is empty."""
    from jaxgpt.prompts import beginning

    if not all(prompts):
        note(f"the prompt is empty: generation starts from {beginning(tokenizer)[1]}")


def _settings(args: Args) -> dict[str, Any]:
    """Return the arguments shared by `generate` and `stream`."""
    check_seed(args.seed)
    names = ("max_new_tokens", "max_length", "stop", "stop_ids", "overflow", "lookup")
    return (
        asdict(settings_of(SamplingParams, args)) | {name: getattr(args, name) for name in names} | {"key": args.seed}
    )


def _training_data(lm: LM, target: str, checkpoint: str, progress: Progress) -> Data:
    """Read the training data of a run.

    Raises:
        UserError: the run has none, it cannot be read, or it has changed since the checkpoint.
    """
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.checkpoint.store import read_info, resolve_step
    from jaxgpt.data import open_data

    if not (lm.config.data.path or lm.config.data.mix) and lm.config.data.dataset == "none":
        raise UserError(
            f"--check-memorized needs the training data, and {target} names none: it was imported or saved from Python"
        )
    data = open_data(lm.config, lm.tokenizer, progress)
    directory = Run(Path(target)).checkpoints
    step = resolve_step(directory, checkpoint)
    if read_info(directory / str(step)).about.get("data", data.fingerprint) != data.fingerprint:
        raise UserError(
            f"--check-memorized: the data of {target} has changed since step {step}: {data.source}; restore it"
        )
    return data


def _memorized(lm: LM, data: Data, outs: Sequence[Generation]) -> tuple[list[Memorized], float | None]:
    from jaxgpt.report.memorized import find_memorized

    with progress("searching the training data") as activity:
        return find_memorized([out.ids for out in outs], data, activity)


def _print_memorized(spans: Sequence[Memorized], validation: float | None) -> None:
    from jaxgpt.report.memorized import PIECES

    print("---")
    for number, span in enumerate(spans, 1):
        which = f"sample {number}" if len(spans) > 1 else "the sample"
        if not span.tokens:
            print(f"no token of {which} occurs in the training data")
            continue
        size = f"{span.tokens:,} of {span.of:,} tokens, {span.characters:,} characters"
        print(f"longest span of {which} in the training data: {size}, at {span.location}")
        for label in ("text", "before", "after"):
            print(f"  {label:<7} {getattr(span, label)!r}")
    if validation is not None:
        print(f"for comparison, validation text of this length: {validation:g} tokens (median of {PIECES} pieces)")


def _stream(lm: LM, prompt: str, prompt_input: Any, settings: dict[str, Any]) -> Generation:
    from jaxgpt.lm import stream

    pieces = stream(lm, [prompt_input], **settings)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece.text, end="", flush=True)
        if piece.done:
            print()
            _note_exhausted(piece.done, "the sample", settings["no_repeat_ngram_size"])
            done = piece.done
    return done


def _note_exhausted(out: Generation, which: str, n: int) -> None:
    if out.finish_reason == "exhausted":
        note(f"{which} ended after {len(out.ids)} tokens: no-repeat-ngram-size {n} forbids every token")


def _prompts(args: Args) -> list[str]:
    if not args.prompts_file:
        return [args.prompt]
    if args.prompt:
        raise UserError("--prompt and --prompts-file cannot be combined: choose one")
    try:
        # Not splitlines: a prompt may contain form feeds and Unicode line separators.
        lines = Path(args.prompts_file).read_text("utf-8-sig").split("\n")
    except OSError as e:
        raise UserError(f"cannot read {args.prompts_file}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise UserError(f"cannot read {args.prompts_file}: it is not UTF-8 text (byte {e.start})") from None
    lines = lines if lines[-1] else lines[:-1]
    if not lines:
        raise UserError(f"{args.prompts_file} is empty: write one prompt per line")
    for number, line in enumerate(lines, 1):
        if not line:
            raise UserError(f"{args.prompts_file}: line {number} is empty: write a prompt on it, or remove it")
    return lines
