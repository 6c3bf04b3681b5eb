"""jaxgpt sample RUN --prompt TEXT"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.cli.parse import parse, print_json, split_target
from jaxgpt.config import MeshConfig, UserError

PROG = "jaxgpt sample RUN"


@dataclass(frozen=True)
class Args:
    prompt: str = ""  # what the text begins with; empty: from the start of a text
    prompts_file: str = ""  # a file with a prompt on each line, instead of --prompt
    max_new_tokens: int = 200  # at most so many tokens
    temperature: float = 0.8  # logits are divided by it; 0: always the likeliest
    top_k: int = 0  # only the k likeliest; 0: all
    top_p: float = 1.0  # only the likeliest that together reach this probability; 1: all
    num_samples: int = 1  # samples of each prompt
    seed: int = 1337  # of the draws
    checkpoint: str = "best"  # best (lowest validation loss), last, or a step
    json: bool = False  # one JSON object instead of text


def run(args: Sequence[str]) -> int:
    target, flags = split_target(args, PROG)
    parsed = parse(Args, flags, PROG, "Text from a run.")
    prompts = _prompts(parsed)
    if parsed.num_samples < 1:
        raise UserError(f"num-samples must be at least 1, not {parsed.num_samples}")
    if not 0 <= parsed.seed < 2**32:
        raise UserError(f"seed must be between 0 and {2**32 - 1}, not {parsed.seed}")

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    import jax

    from jaxgpt.lm import generate, load

    lm = load(target, parsed.checkpoint)
    repeated = [prompt for prompt in prompts for _ in range(parsed.num_samples)]
    outs = generate(
        lm,
        repeated,
        max_new_tokens=parsed.max_new_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        top_p=parsed.top_p,
        key=jax.random.key(parsed.seed),
    )
    if parsed.json:
        rows = [{"prompt": p} | out._asdict() for p, out in zip(repeated, outs, strict=True)]
        print_json({"run": target, "samples": rows})
        return 0
    glue = lm.tokenizer.glue
    for number, (prompt, out) in enumerate(zip(repeated, outs, strict=True)):
        if number:
            print("---")
        print(prompt + (glue if prompt and out.text else "") + out.text)
    return 0


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
