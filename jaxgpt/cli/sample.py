"""jaxgpt sample RUN --prompt TEXT"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jaxgpt.cli.output import aligned, print_json
from jaxgpt.cli.parse import FLAT, Checkpoint, Json, Seed, Special, Weights
from jaxgpt.cli.progress import note, progress
from jaxgpt.cli.settings import load_model
from jaxgpt.config import SEED, BeamParams, SamplingParams, TextParams
from jaxgpt.errors import UserError

if TYPE_CHECKING:
    from jaxgpt.data import Data
    from jaxgpt.data.text import Progress
    from jaxgpt.lm import LM, Generation
    from jaxgpt.report.memorized import Memorized


def sample(
    run: str,
    /,
    *,
    prompt: str = "",
    special: Special = False,
    prompts_file: str = "",
    seed: Seed = SEED,
    stream: bool = False,
    weights: Weights = "float32",
    checkpoint: Checkpoint = "best",
    check_memorized: bool = False,
    json: Json = False,
    text: Annotated[TextParams, FLAT] = TextParams(),
    sampling: Annotated[SamplingParams, FLAT] = SamplingParams(),
    beams: Annotated[BeamParams, FLAT] = BeamParams(),
) -> int:
    """Generate text from a run.

    jaxgpt sample runs/shakespeare --prompt ROMEO: --max-new-tokens 500
    jaxgpt sample runs/shakespeare --prompt ROMEO: --temperature 0 --stream
    jaxgpt sample runs/shakespeare --prompts-file prompts.txt --num-return-sequences 3 --json
    jaxgpt sample runs/shakespeare --prompt ROMEO: --check-memorized

    Args:
        run: run with the model
        prompt: text to continue; empty: start a new text
        prompts_file: file with one prompt per line, instead of --prompt
        stream: print the text as it is generated
        check_memorized: find the longest span of each sample that occurs verbatim in the training data
    """
    if prompt and prompts_file:
        raise UserError("--prompt and --prompts-file cannot be combined: choose one")
    prompts = _read_prompts(prompts_file) if prompts_file else [prompt]
    if stream and (json or beams.num_beams > 1 or len(prompts) * beams.num_return_sequences > 1):
        raise UserError(
            "--stream prints a single sample: leave out --json, --num-beams, --num-return-sequences and further prompts"
        )

    lm = load_model(run, checkpoint, weights)
    from jaxgpt.lm import generate

    if check_memorized:
        with progress("tokenizing") as activity:
            data = _training_data(lm, run, checkpoint, activity)
    inputs = [
        _encoded(lm, text, special, f"{prompts_file}: line {n}: " * bool(prompts_file))
        for n, text in enumerate(prompts, 1)
    ]
    settings: dict[str, Any] = asdict(text) | asdict(sampling) | {"key": seed}
    began = time.perf_counter()
    if stream:
        outs = [_stream(lm, prompt, inputs[0], settings)]
    else:
        with progress("sampling") as activity:
            outs = generate(lm, inputs, **settings, **asdict(beams), progress=activity)
    seconds = time.perf_counter() - began
    note(f"sampled from {lm.source}")
    repeated = [prompt for prompt in prompts for _ in range(beams.num_return_sequences)]
    rows: list[dict[str, Any]] = [
        {"prompt": prompt} | out._asdict() for prompt, out in zip(repeated, outs, strict=True)
    ]
    results: dict[str, Any] = {"run": run, "model": lm.source, "samples": rows, "seconds": seconds}
    if check_memorized:
        from jaxgpt.report.memorized import find_memorized

        with progress("searching the training data") as activity:
            spans, validation = find_memorized([out.ids for out in outs], data, activity)
        for row, span in zip(rows, spans, strict=True):
            row["memorized"] = asdict(span)
        results["validation_tokens"] = validation
    if json:
        print_json(results)
        return 0
    if not stream:
        print("\n---\n".join(prompt + out.text for prompt, out in zip(repeated, outs, strict=True)))
    if check_memorized:
        _print_memorized(spans, validation)
    return 0


def _read_prompts(name: str) -> list[str]:
    """Read one prompt per line."""
    try:
        # Not splitlines: a prompt may contain form feeds and Unicode line separators.
        lines = Path(name).read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as e:
        raise UserError(f"cannot read {name}: it is not UTF-8 text (byte {e.start})") from None
    lines = lines if lines[-1] else lines[:-1]
    if not lines:
        raise UserError(f"{name} is empty: write one prompt per line")
    if "" in lines:
        raise UserError(f"{name}: line {lines.index('') + 1} is empty: write a prompt on it, or remove it")
    return lines


def _encoded(lm: LM, prompt: str, special: bool, place: str) -> list[int] | str:
    """Encode a prompt, unless it is empty; `place` begins the error of a line of a file."""
    from jaxgpt.lm.arguments import encode_prompt

    try:
        encoded = encode_prompt(lm.tokenizer, lm.config.model.vocab_size, prompt, special)
    except UserError as e:
        raise UserError(f"{place}{e}") from None
    return encoded.ids if encoded.text_ids else ""


def _training_data(lm: LM, target: str, checkpoint: str, progress: Progress) -> Data:
    """Read the training data of a run, which must not have changed since the checkpoint."""
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.checkpoint.store import read_info, resolve_step
    from jaxgpt.data import open_data

    if not (lm.config.data.path or lm.config.data.mix) and lm.config.data.dataset == "none":
        raise UserError(
            f"--check-memorized needs the training data, but {target} was imported or saved from Python, without data"
        )
    data = open_data(lm.config, lm.tokenizer, progress)
    directory = Run(Path(target)).checkpoints
    step = resolve_step(directory, checkpoint)
    if read_info(directory / str(step)).about.get("data", data.fingerprint) != data.fingerprint:
        raise UserError(
            f"--check-memorized: the data of {target} has changed since step {step}: {data.source}; restore it"
        )
    return data


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
        print(aligned({f"  {label}": repr(getattr(span, label)) for label in ("text", "before", "after")}))
    if validation is not None:
        print(f"for comparison, validation text of this length: {validation:g} tokens (median of {PIECES} pieces)")


def _stream(lm: LM, prompt: str, prompt_input: Any, settings: dict[str, Any]) -> Generation:
    """Print a sample while it is generated."""
    from jaxgpt.lm import stream

    print(prompt, end="", flush=True)
    for piece in stream(lm, [prompt_input], **settings):
        print(piece.text, end="", flush=True)
        if piece.done:
            done = piece.done
    print()
    return done
