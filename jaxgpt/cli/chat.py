"""jaxgpt chat RUN"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxgpt.cli.parse import Command, note, print_json
from jaxgpt.cli.progress import progress
from jaxgpt.cli.sample import check_seed
from jaxgpt.config import SEED, MeshConfig, SamplingParams, UserError, settings_of
from jaxgpt.signals import stop_on_signal

if TYPE_CHECKING:
    from jaxgpt.lm import Chat, Generation

COMMAND = Command(
    "chat",
    "RUN",
    "Chat with a model that has a chat template, such as an imported instruction-tuned model.",
    [
        "jaxgpt chat runs/smollm2",
        'jaxgpt chat runs/smollm2 --system "Answer in one sentence." --temperature 0',
        'jaxgpt chat runs/smollm2 --once "What is the capital of France?" --json',
    ],
)
HELP = """/system TEXT  replace the system message
/reset        clear the conversation except for the system message
/save FILE    write the conversation as JSON
/quit         quit (or Ctrl-D); Ctrl-C stops an answer, and pressed twice quits"""


@dataclass(frozen=True, kw_only=True)
class Args(SamplingParams):
    once: str = ""  # answer this message and exit
    system: str = ""  # system message
    max_new_tokens: int | None = None  # maximum length of an answer (default: 512, or fewer where the context ends)
    stop: tuple[str, ...] = ()  # strings that end an answer and are not part of it
    seed: int = SEED  # random seed of the first answer; it increases by 1 with each answer
    weights: Literal["float32", "bfloat16", "int8"] = "float32"  # precision of the weights in memory
    checkpoint: str = "best"  # best (lowest validation loss), last, or a step
    json: bool = False  # with --once: print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [target], parsed = COMMAND.parse(Args, args)
    check_seed(parsed.seed)
    if parsed.json and not parsed.once:
        raise UserError("--json prints the answer to one message: give it with --once TEXT")

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    from jaxgpt.lm import Chat, load

    with progress("loading"):
        lm = load(target, parsed.checkpoint, parsed.weights)
    conversation = Chat(lm, _system(parsed.system))
    return (_once if parsed.once else _talk)(target, conversation, parsed)


def _talk(target: str, conversation: Chat, args: Args) -> int:
    if sys.stdin.isatty():
        print(f"{target}: /help lists the commands", file=sys.stderr)
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
    seed = args.seed
    for line in _lines(sys.stdin.isatty()):
        try:
            if line.startswith("/"):
                if not _command(line, conversation):
                    break
            else:
                _answer(conversation, line, args, seed)
                seed += 1
        except UserError as e:
            if not sys.stdin.isatty():
                raise
            print(f"jaxgpt: {e}", file=sys.stderr)
    return 0


def _system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the lines that are not empty."""
    if not terminal:
        try:
            yield from filter(None, (line.rstrip("\r\n") for line in sys.stdin))
        except UnicodeDecodeError as e:
            raise UserError(f"standard input is not {e.encoding} text (byte {e.start})") from None
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nuse /quit or Ctrl-D to quit", file=sys.stderr)
            continue
        if line:
            yield line


def _command(line: str, conversation: Chat) -> bool:
    """Run a command; return False to quit."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    system = [message for message in conversation.messages if message["role"] == "system"]
    match name:
        case "/quit" | "/exit":
            return False
        case "/help":
            print(HELP)
        case "/reset":
            conversation.messages = system
        case "/system":
            conversation.messages = _system(argument) + conversation.messages[len(system) :]
        case "/save":
            _save(argument, conversation)
        case _:
            raise UserError(f"unknown command {name}: /help lists the commands")
    return True


def _save(name: str, conversation: Chat) -> None:
    from jaxgpt.files import write_atomically

    if not name:
        raise UserError("/save needs a file name, as in /save chat.json")
    try:
        write_atomically(Path(name), json.dumps({"messages": conversation.messages}, ensure_ascii=False) + "\n")
    except OSError as e:
        raise UserError(f"cannot write {name}: {e.strerror}") from None
    note(f"saved {len(conversation.messages)} messages in {name}")


def _settings(args: Args, seed: int) -> dict[str, Any]:
    return {
        "max_new_tokens": args.max_new_tokens,
        "sampling": settings_of(SamplingParams, args),
        "stop": args.stop,
        "key": seed % 2**32,
    }


def _answer(conversation: Chat, text: str, args: Args, seed: int) -> None:
    """Print the answer while it is generated. Ctrl-C stops it; the conversation keeps what has been printed."""
    with stop_on_signal(notice="") as stop, closing(conversation.answer(text, **_settings(args, seed))) as pieces:
        for piece in pieces:
            print(piece.text, end="", flush=True)
            if stop.requested:
                break
    print(" [stopped]" if stop.requested else "", flush=True)


def _once(target: str, conversation: Chat, args: Args) -> int:
    if not args.json:
        _answer(conversation, args.once, args, args.seed)
        return 0
    began = time.perf_counter()
    *_, last = conversation.answer(args.once, **_settings(args, args.seed))
    done: Generation | None = last.done
    assert done is not None
    print_json(
        {
            "run": target,
            "messages": conversation.messages,
            "answer": done.text,
            "finish_reason": done.finish_reason,
            "prompt_tokens": conversation.prompt_tokens,
            "tokens": len(done.ids),
            "seconds": time.perf_counter() - began,
        }
    )
    return 0
