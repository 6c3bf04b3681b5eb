"""jaxgpt chat RUN"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.output import note, print_json
from jaxgpt.cli.parse import Checkpoint, Json, Seed, Weights
from jaxgpt.cli.settings import load_model
from jaxgpt.config import SEED, SamplingParams
from jaxgpt.errors import UserError
from jaxgpt.signals import stop_on_signal

if TYPE_CHECKING:
    from jaxgpt.lm import Chat, Generation

HELP = """/system TEXT  replace the system message
/reset        clear the conversation except for the system message
/save FILE    write the conversation as JSON
/quit         quit (or Ctrl-D); Ctrl-C stops an answer, and pressed twice quits"""


def chat(
    run: str,
    /,
    *,
    once: str = "",
    system: str = "",
    max_new_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    seed: Seed = SEED,
    weights: Weights = "float32",
    checkpoint: Checkpoint = "best",
    json: Json = False,
    sampling: SamplingParams,
) -> int:
    """Chat with a model that has a chat template, such as an imported instruction-tuned model.

    jaxgpt chat runs/smollm2
    jaxgpt chat runs/smollm2 --system "Answer in one sentence." --temperature 0
    jaxgpt chat runs/smollm2 --once "What is the capital of France?" --json

    Args:
        run: run with the model
        once: answer this message and exit
        system: system message
        max_new_tokens: maximum length of an answer; by default 512, or fewer where the context ends
        stop: strings that end an answer and are not part of it
    """
    if json and not once:
        raise UserError("--json prints the answer to one message: give it with --once TEXT")

    lm = load_model(run, checkpoint, weights)
    from jaxgpt.lm import Chat

    conversation = Chat(lm, _system(system))

    def answer(text: str, number: int = 0) -> Iterator[Any]:
        key = (seed + number) % 2**32  # the seed increases by 1 with each answer
        return conversation.answer(text, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, key=key)

    if json:
        print_json({"run": run, "model": lm.source} | _complete(conversation, answer(once)))
    elif once:
        _print(answer(once))
    else:
        return _talk(lm.source, conversation, answer)
    return 0


def _talk(model: str, conversation: Chat, answer: Callable[[str, int], Iterator[Any]]) -> int:
    """Answer line by line; return 2 if a line of a pipe could not be answered."""
    terminal, answers, code = sys.stdin.isatty(), 0, 0
    if terminal:
        print(f"{model}: /help lists the commands", file=sys.stderr)
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
    for line in _lines(terminal):
        try:
            if not line.startswith("/"):
                _print(answer(line, answers))
                answers += 1
            elif not _command(line, conversation):
                break
        except UserError as e:
            note(str(e))
            code = 0 if terminal else 2
    return code


def _print(pieces: Iterator[Any]) -> None:
    """Print an answer while it is generated. Ctrl-C stops it; the conversation keeps what has been printed."""
    with stop_on_signal(notice="") as stop, closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            print(piece.text, end="", flush=True)
            if stop.requested:
                break
    print(" [stopped]" if stop.requested else "", flush=True)


def _complete(conversation: Chat, pieces: Iterator[Any]) -> dict[str, Any]:
    began = time.perf_counter()
    *_, last = pieces
    done: Generation = last.done
    return {
        "messages": conversation.messages,
        "answer": done.text,
        "finish_reason": done.finish_reason,
        "prompt_tokens": conversation.prompt_tokens,
        "tokens": len(done.ids),
        "seconds": time.perf_counter() - began,
    }


def _system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the non-empty lines."""
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
        write_atomically(Path(name), dumps({"messages": conversation.messages}, ensure_ascii=False) + "\n")
    except OSError as e:
        raise UserError(f"cannot write {name}: {e.strerror}") from None
    note(f"saved {len(conversation.messages)} messages in {name}")
