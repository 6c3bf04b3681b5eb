"""jaxgpt chat RUN"""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.atomic import write_atomically
from jaxgpt.cli.console import note, progress
from jaxgpt.cli.options import NO_SAMPLING, Checkpoint, GivenSampling, Json, Seed, Weights
from jaxgpt.cli.output import print_json
from jaxgpt.cli.sampling_note import note_sampling
from jaxgpt.config import SamplingParams
from jaxgpt.errors import BAD_INPUT, UserError, reported
from jaxgpt.options import SEED
from jaxgpt.settings import check_text
from jaxgpt.signals import stop_on_signal
from jaxgpt.template_variables import parse_variables

if TYPE_CHECKING:
    from jaxgpt.lm import Chat, Piece

HELP = """/reset        clear the conversation except for the system message
/save FILE    write the conversation as JSON
/quit         quit (or press Ctrl-D); Ctrl-C stops an answer; two Ctrl-C within two seconds quit"""


def chat(
    run: str,
    /,
    *,
    once: str = "",
    system: str = "",
    chat_template_kwargs: str = "",
    max_new_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    seed: Seed = SEED,
    weights: Weights = "float32",
    checkpoint: Checkpoint = "best",
    json: Json = False,
    sampling: GivenSampling = NO_SAMPLING,
) -> int:
    """Chat with a model that has a chat template, such as an imported instruction-tuned model.

    jaxgpt chat runs/smollm2
    jaxgpt chat runs/smollm2 --system "Answer in one sentence." --temperature 0
    jaxgpt chat runs/smollm2 --once "What is the capital of France?" --json

    Args:
        run: run with the model
        once: answer this message and exit
        system: system message
        chat_template_kwargs: variables of the chat template, as JSON, such as {"enable_thinking": false}, in addition to
            the variables that the run was fine-tuned with
        max_new_tokens: maximum number of tokens in an answer; by default 512, limited by the context length
        stop: strings that end an answer, excluded from it
    """
    if json and not once:
        raise UserError("--json prints the answer to one message: pass the message with --once TEXT")
    SamplingParams(**sampling)  # check the values before the model is read
    variables = parse_variables(chat_template_kwargs, "--chat-template-kwargs")
    from jaxgpt.lm import Chat, load

    with progress("loading"):
        lm = load(run, checkpoint, weights)
    note_sampling(lm, sampling)
    messages = [{"role": "system", "content": system}] if system else []
    conversation = Chat(lm, messages, chat_template_kwargs=variables)
    if conversation.warning and not stop:
        note(conversation.warning)

    options = {"max_new_tokens": max_new_tokens, "stop": stop, **sampling}
    if not once:
        return _talk(lm.source, conversation, seed, options)
    pieces = conversation.answer(once, key=seed, **options)
    if json:
        print_json({"run": run, "model": lm.source, **_to_json(conversation, pieces)})
    else:
        _print(pieces)
    return 0


def _to_json(conversation: Chat, pieces: Iterator[Piece]) -> dict[str, Any]:
    """Generate an answer, and return it with its conversation."""
    *_, last = pieces
    assert last.done is not None
    return {
        "messages": conversation.messages,
        "answer": last.done.text,
        "tokens": len(last.done.ids),
        "finish_reason": last.done.finish_reason,
        "prompt_tokens": conversation.prompt_tokens,
    }


def _talk(model: str, conversation: Chat, seed: int, options: Mapping[str, Any]) -> int:
    """Answer each input line, or run it as a command; return the exit code, `BAD_INPUT` if a line of a pipe or file failed.

    The random key of an answer is `seed` plus the number of previous answers; `options` are the other arguments of
    `Chat.answer`.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{model}: /help lists the commands", file=sys.stderr)
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())

    answers = 0
    code = 0
    for line in _lines(is_terminal):
        try:
            if not line.startswith("/"):
                _print(conversation.answer(line, key=(seed + answers) % 2**32, **options))
                answers += 1
            elif not _command(line, conversation):
                break
        except UserError as e:
            note(str(e))
            code = 0 if is_terminal else BAD_INPUT
    return code


def _print(pieces: Generator[Piece, None, None]) -> None:
    """Print an answer as it is generated. Ctrl-C stops the answer; the conversation keeps the printed part."""
    with stop_on_signal(notice="", signals=[signal.SIGINT]) as stop, closing(pieces):
        for piece in pieces:
            print(piece.text, end="", flush=True)
            if stop.requested:
                break
    print(" [stopped]" if stop.requested else "", flush=True)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yield the lines of standard input, stripped; skip blank lines. Raises `UserError` for bytes that are not text."""
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            print(end="\n" if is_terminal else "")
            return
        except UnicodeDecodeError as e:
            raise UserError(f"standard input is not {e.encoding} text (byte {e.start}): convert it") from None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\nuse /quit or Ctrl-D to quit", file=sys.stderr)
        else:
            if line:
                yield line


def _command(line: str, conversation: Chat) -> bool:
    """Run a command; return False to quit. Raises `UserError` for an unknown command, or a file that cannot be written."""
    match line.split(maxsplit=1):
        case ["/quit", *_]:
            return False
        case ["/help", *_]:
            print(HELP)
        case ["/reset", *_]:
            conversation.messages = [message for message in conversation.messages if message["role"] == "system"]
        case ["/save", file]:
            check_text("file", file)
            with reported(f"cannot write {file}"):
                write_atomically(Path(file), dumps({"messages": conversation.messages}, ensure_ascii=False) + "\n")
            note(f"saved {len(conversation.messages)} messages in {file}")
        case ["/save"]:
            raise UserError("/save needs a file name: use /save FILE")
        case _:
            raise UserError(f"unknown command {line}: /help lists the commands")
    return True
