"""jaxgpt sample RUN --prompt TEXT"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from jaxgpt.cli.console import note, progress
from jaxgpt.cli.memorized import find_in_training, memorized_text, open_training_data
from jaxgpt.cli.options import FLAT, NO_SAMPLING, Checkpoint, GivenSampling, Json, Seed, Special, Weights
from jaxgpt.cli.output import print_json
from jaxgpt.cli.sampling_note import note_sampling
from jaxgpt.config import BeamParams, SamplingParams, TextParams
from jaxgpt.errors import UserError
from jaxgpt.options import SEED

if TYPE_CHECKING:
    from jaxgpt.lm import LM, Generation
    from jaxgpt.report.training_spans import TrainingSpans


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
    from jaxgpt.lm.beams import BEAMS_REJECT

    with progress("loading"):
        lm = load(run, checkpoint, weights)
    data = open_training_data(lm, run, checkpoint) if check_memorized else None

    new_text = ""  # an empty list of ids is not a prompt
    inputs = [encode_prompt(lm.tokenizer, lm.config.model.vocab_size, each, special) or new_text for each in prompts]
    note_sampling(lm, sampling, () if beams.num_beams == 1 else BEAMS_REJECT)
    settings: dict[str, Any] = {"key": seed, **asdict(text), **sampling}
    if stream:
        generations = [_stream(lm, prompts[0], inputs[0], settings)]
    else:
        with progress("sampling") as activity:
            generations = generate(lm, inputs, **settings, **asdict(beams), progress=activity)
    note(f"sampled from {lm.source}")
    found = find_in_training(generations, data) if data is not None else None

    repeated = [each for each in prompts for _ in range(beams.num_return_sequences)]
    samples = [Sample(*pair) for pair in zip(repeated, generations, strict=True)]
    if json:
        print_json({"run": run, "model": lm.source, **_to_json(samples, found)})
        return 0
    if not stream:
        print("\n---\n".join(each.text for each in samples))
    if found is not None:
        print(f"---\n{memorized_text(found)}")
    return 0


class Sample(NamedTuple):
    """A prompt, as on the command line, and a generated continuation."""

    prompt: str
    generation: Generation

    @property
    def text(self) -> str:
        """The prompt with its continuation."""
        return self.prompt + self.generation.text


def _to_json(samples: Sequence[Sample], found: TrainingSpans | None) -> dict[str, Any]:
    """Return samples as values for JSON and, unless `found` is None, their spans in the training data."""
    rows: list[dict[str, Any]] = [{"prompt": each.prompt, **each.generation._asdict()} for each in samples]
    if found is None:
        return {"samples": rows}
    for row, span in zip(rows, found.spans, strict=True):
        row["memorized"] = asdict(span)
    return {"samples": rows, "validation_tokens": found.validation}


def _stream(lm: LM, prompt: str, encoded: list[int] | str, settings: Mapping[str, Any]) -> Generation:
    """Print a prompt, and its continuation as it is generated; return the continuation.

    Args:
        lm: model.
        prompt: text to print.
        encoded: ids of the prompt; "": start a new text.
        settings: keyword arguments of `jaxgpt.stream`.
    """
    from jaxgpt.lm import stream

    done: Generation | None = None
    print(prompt, end="", flush=True)
    for piece in stream(lm, [encoded], **settings):
        print(piece.text, end="", flush=True)
        done = piece.done
    print()
    assert done is not None  # the last piece has the complete sample
    return done
