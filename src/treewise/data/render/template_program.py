"""The program that renders chat templates, alone in a process: `template_process.py` starts it, asks it and ends it.

It imports the standard library and Jinja, nothing else: a chat template is a program from others, so what it takes of
time and memory is taken here. Templates see what transformers shows them: its filters and functions, and plain JSON
values. Requests and answers are JSON behind eight bytes of length.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MAX_CHARACTERS = 100_000_000  # of one conversation
MAX_MESSAGE = 1000  # characters of an error, which a template may write, too


class LimitError(Exception):
    """A template went beyond a limit; the message follows its name."""


def main(seconds: float, num_bytes: int, folders: list[str]) -> None:
    """Answers requests until they end. folders: where packages are, beside the standard library."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to a run, which ends this process itself
        signal.signal(ending, signal.SIG_IGN)
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, num_bytes)):
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):  # macOS has no limit of memory: there the parent alone looks
            continue
    sys.path += folders
    import jinja2.sandbox

    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write(answers, {"jinja": jinja2.__version__})
    while head := requests.read(8):
        is_full = False
        try:
            for answer in answered(json.loads(requests.read(int.from_bytes(head, "big"))), seconds):
                write(answers, answer)
        except MemoryError:
            is_full = True
        if is_full:  # the error and all that it held are gone; what is left of the memory may be in pieces
            write(answers, {"limit": f"takes more than {num_bytes / 2**30:g} GiB of memory"})
            return


def write(stream: BinaryIO, answer: dict[str, Any]) -> None:
    """Sends an answer."""
    body = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(len(body).to_bytes(8, "big"))
    stream.write(body)
    stream.flush()


def answered(request: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
    """An answer for each conversation, up to the first that has an error; one for a template that is only read.

    A request has a template, and `talks`: for each conversation the numbers of its `messages`.
    """
    from jinja2 import TemplateSyntaxError

    messages, talks = request.get("messages", ()), request.get("talks", ())
    try:
        _limit_time(seconds)
        template = compiled(request["template"])
        for talk in talks:
            _limit_time(seconds)
            yield rendered(template, [messages[number] for number in talk], request)
        if not talks:
            yield {}
    except LimitError as error:
        yield {"limit": str(error)}
    except TemplateSyntaxError as error:
        yield {"syntax": str(error.message)[:MAX_MESSAGE], "line": error.lineno}
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        yield {"error": str(error)[:MAX_MESSAGE] or type(error).__name__, "kind": type(error).__name__}


def _limit_time(seconds: float) -> None:
    """Ends this process where its parent has ended and cannot: after more seconds than it would have waited."""
    used, hard = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def rendered(template: "Template", talk: list[dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    """The text of a conversation; the characters in `{% generation %}` blocks; whether it holds the date."""
    own = Output(date.fromisoformat(request["date"]))
    setattr(template.environment, WRITTEN, own)
    pieces = []
    for piece in template.generate(messages=talk, tools=request["tools"], documents=None, **request["variables"]):
        own.num_characters += len(piece)
        if own.num_characters > MAX_CHARACTERS:
            raise LimitError(f"makes more than {MAX_CHARACTERS:,} characters")
        pieces.append(piece)
    return {"text": "".join(pieces), "spans": own.spans, "is_dated": own.is_dated}


@dataclass
class Output:
    """What one rendering has written so far. is_dated: with today's date."""

    today: date
    is_dated: bool = False
    num_characters: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)


WRITTEN = "written"  # the attribute of an environment with the `Output` of the rendering at hand


def _written(environment: "Environment") -> Output:
    own: Output = getattr(environment, WRITTEN)
    return own


@lru_cache(maxsize=64)
def compiled(text: str) -> "Template":
    """A template in the environment that transformers gives to chat templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant wrote."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja reads it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            inside, written = caller(), _written(environment)
            written.spans.append((written.num_characters, written.num_characters + len(inside)))
            return inside

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        written = _written(environment)
        written.is_dated = True
        return written.today.strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(text)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
