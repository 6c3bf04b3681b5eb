"""jaxgpt sample RUN --prompt TEXT"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jaxgpt.cli.options import FLAT, NO_SAMPLING, Checkpoint, GivenSampling, Json, Seed, Special, Weights
from jaxgpt.cli.output import aligned, note, note_sampling, print_json, progress
from jaxgpt.config import BeamParams, SamplingParams, TextParams
from jaxgpt.errors import UserError
from jaxgpt.options import SEED

if TYPE_CHECKING:
    from jaxgpt.data import Data
    from jaxgpt.lm import LM, Generation
    from jaxgpt.progress import Progress
    from jaxgpt.report.memorized import TrainingSpans


def sample(
    run: str,
    /,
    *,
    prompt: tuple[str, ...] = ("",),
    special: Special = False,
    seed: Seed = SEED,
    stream: bool = False,
    weights: Weights = "float32",
    checkpoint: Checkpoint = "best",
    check_memorized: bool = False,
    json: Json = False,
    text: Annotated[TextParams, FLAT] = TextParams(),
    sampling: GivenSampling = NO_SAMPLING,
    beams: Annotated[BeamParams, FLAT] = BeamParams(),
) -> int:
    """Generate text from a run.

    jaxgpt sample runs/shakespeare --prompt ROMEO: --max-new-tokens 500
    jaxgpt sample runs/shakespeare --prompt ROMEO: --temperature 0 --stream
    jaxgpt sample runs/shakespeare --prompt ROMEO: JULIET: --num-return-sequences 3 --json
    jaxgpt sample runs/shakespeare --prompt ROMEO: --check-memorized

    Args:
        run: run with the model
        prompt: texts to continue; empty: start a new text
        stream: print the text as it is generated
        check_memorized: find the longest span of each sample that occurs verbatim in the training data
    """
    prompts = prompt or ("",)  # --prompt without a text
    if stream and (json or beams.num_beams > 1 or len(prompts) * beams.num_return_sequences > 1):
        raise UserError(
            "--stream prints one sample: pass one --prompt, without --json, --num-beams and --num-return-sequences"
        )
    SamplingParams(**sampling)  # check the values before the model is read
    from jaxgpt.lm import generate, load
    from jaxgpt.lm.arguments import encode_prompt
    from jaxgpt.lm.generation import BEAMS_REJECT

    with progress("loading"):
        lm = load(run, checkpoint, weights)
    data: Data | None = None
    if check_memorized:
        with progress("tokenizing") as activity:
            data = _training_data(lm, run, checkpoint, activity)

    inputs = [encode_prompt(lm.tokenizer, lm.config.model.vocab_size, each, special) or "" for each in prompts]
    settings: dict[str, Any] = asdict(text) | {"key": seed} | sampling
    note_sampling(lm, sampling, () if beams.num_beams == 1 else BEAMS_REJECT)
    if stream:
        generations = [_stream(lm, prompts[0], inputs[0], settings)]
    else:
        with progress("sampling") as activity:
            generations = generate(lm, inputs, **settings, **asdict(beams), progress=activity)
    note(f"sampled from {lm.source}")

    repeated = [each for each in prompts for _ in range(beams.num_return_sequences)]
    samples = list(zip(repeated, generations, strict=True))
    found = None if data is None else _find_memorized(generations, data)
    if json:
        print_json({"run": run, "model": lm.source, **_to_json(samples, found)})
        return 0
    if not stream:
        print("\n---\n".join(each + generation.text for each, generation in samples))
    if found:
        _print_memorized(found)
    return 0


def _find_memorized(generations: Sequence[Generation], data: Data) -> TrainingSpans:
    """Find the samples in the training data."""
    from jaxgpt.report.memorized import find_memorized

    with progress("searching the training data") as activity:
        return find_memorized([generation.ids for generation in generations], data, activity)


def _to_json(samples: Sequence[tuple[str, Generation]], found: TrainingSpans | None) -> dict[str, Any]:
    """Return samples, each a prompt and its continuation, as values for JSON."""
    rows: list[dict[str, Any]] = [{"prompt": prompt, **generation._asdict()} for prompt, generation in samples]
    if found is None:
        return {"samples": rows}
    for row, span in zip(rows, found.spans, strict=True):
        row["memorized"] = asdict(span)
    return {"samples": rows, "validation_tokens": found.validation}


def _training_data(lm: LM, target: str, checkpoint: str, progress: Progress) -> Data:
    """Open the data that a run has used up to a checkpoint; raise `UserError` if they have changed since."""
    from jaxgpt.checkpoint.data import open_run_data
    from jaxgpt.checkpoint.index import info_of
    from jaxgpt.checkpoint.run import Run

    data = lm.config.data
    if data.dataset == "none" and not (data.path or data.mix):
        raise UserError(f"--check-memorized does not apply to {target}: the run has no record of its training data")
    run = Run(Path(target))
    info = info_of(run, checkpoint)
    config = replace(lm.config, data=data.with_mixtures_before(info.tokens))
    _, opened, change = open_run_data(run, info, config, lm.tokenizer, progress)
    if change:
        raise UserError(f"{change}; restore it")
    return opened


def _print_memorized(found: TrainingSpans) -> None:
    """Print the longest span of each sample in the training data, and the median of validation texts."""
    from jaxgpt.report.memorized import PIECES

    print("---")
    for number, span in enumerate(found.spans, 1):
        size = f"{span.tokens:,} of {span.of:,} tokens, {span.characters:,} characters"
        print(f"longest span of sample {number} in the training data: {size}, at {span.location or 'no location'}")
        texts = {"  text": span.text, "  before": span.before, "  after": span.after}
        print(aligned({label: repr(text) for label, text in texts.items()}))
    if found.validation is not None:
        length = f"{found.validation:g} tokens"
        print(f"median longest span of {PIECES} validation texts as long as the longest sample: {length}")


def _stream(lm: LM, prompt: str, encoded: list[int] | str, settings: dict[str, Any]) -> Generation:
    """Print a prompt and a sample as it is generated; return the sample. `encoded`: ids of the prompt; "": no prompt."""
    from jaxgpt.lm import stream

    done: Generation | None = None
    print(prompt, end="", flush=True)
    for piece in stream(lm, [encoded], **settings):
        print(piece.text, end="", flush=True)
        done = piece.done
    print()
    assert done is not None  # the last piece has the complete sample
    return done
