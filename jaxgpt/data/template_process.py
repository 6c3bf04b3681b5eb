"""Child process that renders chat templates. `chat_template.py` runs this file as a script; it imports nothing of jaxgpt.

A template is a program that came with a model. It runs in Jinja2's immutable sandbox, in a process that can open no files and
has little memory and CPU time. One JSON object per line in, one out.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

if __name__ == "__main__":
    sys.path.extend(sys.argv[1:])

import jinja2
import jinja2.debug  # Jinja2 imports it at the first error, when no file can be opened
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30  # bytes of address space


class _Generation(Extension):
    """Implement `{% generation %} ... {% endgeneration %}`, which encloses the text that the assistant writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{MARK}{caller()}{MARK}"


MARK = secrets.token_hex(16)  # no message can contain it


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **_: Any) -> str:
    # Jinja2's own filter escapes <, > and &.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: _now().strftime(form)
    return environment.from_string(source)


_now: Callable[[], datetime] = datetime.now


def render(source: str, variables: dict[str, Any], date: str = "") -> dict[str, Any]:
    """Render a template: its text, and the ranges `[begin, end)` of characters inside `{% generation %}`."""
    global _now
    _now = (lambda: datetime.fromisoformat(date)) if date else datetime.now
    parts = _compile(source).render(variables).split(MARK)
    text, spans = "", []
    for number, part in enumerate(parts):
        if number % 2:
            spans.append([len(text), len(text) + len(part)])
        text += part
    return {"text": text, "spans": spans}


def _confine() -> None:
    # Trigger lazy loading now, while files can be opened: the time zone, a codec, error handling.
    datetime.now().strftime("%Z")
    for first_use in ("{{ '\\n' | tojson }}", "{{ undefined.attribute }}", "{% broken %}"):
        with suppress(jinja2.TemplateError):
            render(first_use, {})
    try:
        import resource
    except ImportError:  # Windows: the sandbox and the parent's time limit remain
        return
    for limit, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))


def main() -> None:
    """Answer the requests on standard input until end of file."""
    _confine()
    for line in sys.stdin:
        request = json.loads(line)
        _limit(request["seconds"])
        answers = [_answer(request["source"], variables, request["date"]) for variables in request["variables"]]
        _limit(0)
        print(json.dumps(answers), flush=True)


def _limit(seconds: float) -> None:
    """End the process, by SIGPROF, after this much more CPU time; 0: no limit."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent may ignore it
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(source: str, variables: dict[str, Any], date: str) -> dict[str, Any]:
    try:
        return render(source, variables, date)
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB"}
    except jinja2.TemplateSyntaxError as e:
        return {"error": f"line {e.lineno}: {e.message}", "broken": True}
    except Exception as e:  # a template can raise anything
        return {"error": f"{e}" or type(e).__name__}


if __name__ == "__main__":
    main()
