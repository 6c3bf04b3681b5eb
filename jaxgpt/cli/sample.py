"""jaxgpt sample RUN --prompt TEXT"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxgpt.cli.parse import Command, note, print_json
from jaxgpt.config import MeshConfig, UserError

if TYPE_CHECKING:
    from jaxgpt.data import Tokenizer
    from jaxgpt.lm import LM

COMMAND = Command(
    "sample",
    "RUN",
    "Generate text from a run, one token after another.",
    [
        "jaxgpt sample runs/shakespeare --prompt ROMEO: --max-new-tokens 500",
        "jaxgpt sample runs/shakespeare --prompt ROMEO: --temperature 0 --stream",
        "jaxgpt sample runs/shakespeare --prompts-file prompts.txt --num-return-sequences 3 --json",
    ],
)
TEMPERATURE = 0.8  # of draws, where nothing else is said


@dataclass(frozen=True)
class Args:
    prompt: str = ""  # what the text begins with; empty: from the start of a text
    prompts_file: str = ""  # a file with a prompt on each line, instead of --prompt
    max_new_tokens: int | None = None  # at most so many tokens (default: 200)
    max_length: int | None = None  # instead: at most so many tokens with the prompt
    temperature: float | None = None  # logits are divided by it; 0: always the likeliest (default: 0.8)
    top_k: int = 0  # only the k likeliest; 0: all
    top_p: float = 1.0  # only the likeliest that together reach this probability; 1: all
    min_p: float = 0.0  # only what is at least so many times as likely as the likeliest; 0: all
    repetition_penalty: float = 1.0  # what was said before is made less likely by it; 1: off
    no_repeat_ngram_size: int = 0  # so many tokens in a row never come twice; 0: off
    num_beams: int = 1  # above 1: beam search, the likeliest of so many texts at once; nothing is drawn
    num_return_sequences: int = 1  # texts for each prompt: draws, or the best of the beams
    length_penalty: float = 1.0  # beams are compared by log p / length ** length_penalty
    early_stopping: Literal["true", "false", "never"] = "false"  # stop beams once num_beams texts have finished
    stop: tuple[str, ...] = ()  # texts that end a sample, and are no part of it
    stop_ids: tuple[int, ...] = ()  # ids that end a sample, and are no part of it
    beyond: Literal["error", "slide"] = "error"  # a text longer than the context: an error, or forget its beginning
    seed: int = 1337  # of the draws
    stream: bool = False  # print the text as it is made
    weights: Literal["float32", "bfloat16", "int8"] = "float32"  # precision in which the weights are kept
    checkpoint: str = "best"  # best (lowest validation loss), last, or a step
    json: bool = False  # one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [target], parsed = COMMAND.parse(Args, args)
    prompts = _prompts(parsed)
    check_seed(parsed.seed)
    if parsed.stream and (parsed.json or parsed.num_beams > 1 or len(prompts) * parsed.num_return_sequences > 1):
        raise UserError("--stream prints one sample as it is made: no --json, no beams, one prompt, one sequence")

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    from jaxgpt.decoding import compilations
    from jaxgpt.lm import generate, load

    settings = _settings(parsed)
    lm = load(target, parsed.checkpoint, parsed.weights)
    for number, line in enumerate(prompts if parsed.prompts_file else (), 1):
        try:
            lm.tokenizer.encode(line)
        except UserError as e:
            raise UserError(f"{parsed.prompts_file}: line {number}: {e}") from None
    say_where_it_begins(lm.tokenizer, prompts)
    if parsed.stream:
        return _stream(lm, prompts[0], settings)
    began, compiled = time.perf_counter(), compilations()
    outs = generate(
        lm,
        prompts,
        num_beams=parsed.num_beams,
        num_return_sequences=parsed.num_return_sequences,
        length_penalty=parsed.length_penalty,
        early_stopping={"true": True, "false": False, "never": "never"}[parsed.early_stopping],  # type: ignore[arg-type]
        **settings,
    )
    seconds = time.perf_counter() - began
    repeated = [prompt for prompt in prompts for _ in range(parsed.num_return_sequences)]
    if parsed.json:
        rows = [{"prompt": p} | out._asdict() for p, out in zip(repeated, outs, strict=True)]
        figures = {"compilations": compilations() - compiled, "seconds": seconds}
        print_json({"run": target, "samples": rows} | figures)
        return 0
    for number, (prompt, out) in enumerate(zip(repeated, outs, strict=True)):
        if number:
            print("---")
        print(_joined(lm, prompt, out.text))
    return 0


def check_seed(seed: int) -> None:
    """A seed that a key can be made of."""
    if not 0 <= seed < 2**32:
        raise UserError(f"seed must be between 0 and {2**32 - 1}, not {seed}")


def say_where_it_begins(tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
    """A note where a prompt is empty."""
    from jaxgpt.prompts import beginning

    if not all(prompts):
        note(f"the prompt is empty: the text begins after {beginning(tokenizer)[1]}")


def _settings(args: Args) -> dict[str, Any]:
    import jax

    same = ("repetition_penalty", "no_repeat_ngram_size", "max_length", "stop", "stop_ids")
    drawing = ("top_k", "top_p", "min_p", "beyond")
    settings = {name: getattr(args, name) for name in same}
    settings["max_new_tokens"] = 200 if args.max_length is None and args.max_new_tokens is None else args.max_new_tokens
    if args.num_beams <= 1:
        temperature = TEMPERATURE if args.temperature is None else args.temperature
        settings |= {name: getattr(args, name) for name in drawing}
        return settings | {"temperature": temperature, "key": jax.random.key(args.seed)}
    # What has no part in beam search is handed on only where it was asked for, and refused there.
    defaults = Args()
    settings |= {name: getattr(args, name) for name in drawing if getattr(args, name) != getattr(defaults, name)}
    return settings | ({} if args.temperature is None else {"temperature": args.temperature})


def _stream(lm: LM, prompt: str, settings: dict[str, Any]) -> int:
    from jaxgpt.lm import stream

    pieces = stream(lm, [prompt], **settings)
    print(prompt, end="", flush=True)
    glue = lm.tokenizer.glue if prompt else ""
    for piece in pieces:
        print(glue + piece.text if piece.text else "", end="", flush=True)
        glue = "" if piece.text else glue
    print()
    return 0


def _joined(lm: LM, prompt: str, text: str) -> str:
    return prompt + (lm.tokenizer.glue if prompt and text else "") + text


def _prompts(args: Args) -> list[str]:
    if not args.prompts_file:
        return [args.prompt]
    if args.prompt:
        raise UserError("--prompt and --prompts-file: choose one")
    try:
        lines = Path(args.prompts_file).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {args.prompts_file}: {e}") from None
    if not lines:
        raise UserError(f"{args.prompts_file} is empty")
    for number, line in enumerate(lines, 1):
        if not line:
            raise UserError(f"{args.prompts_file}: line {number} is empty")
    return lines
