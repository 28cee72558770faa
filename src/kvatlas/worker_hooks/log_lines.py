"""The lines that a process of ours logs: when, who, how bad, what; one form for all roles."""

import copy
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvatlas.common.line_writing import write_line
from kvatlas.schemas.printable import printable, printable_lines

#: lines are alike whose logger and first characters are equal
KIND_CHARS = 60
#: kinds of lines that are counted at once; the oldest is forgotten
MAX_KINDS = 256
ALIKE_SECONDS = 60.0
ALWAYS_WRITTEN = 3
FORM = "%(asctime)s {who} %(levelname)s %(message)s"

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LineFormatter(logging.Formatter):
    """Writes each message as one printable line, and tracebacks as indented ones.

    What others send reaches the log in names, reasons and errors: here it cannot forge a line, and
    credentials of URLs are left out, whatever logs them.
    """

    def format(self, record: logging.LogRecord) -> str:
        plain = copy.copy(record)  # other handlers get it as it is
        plain.msg, plain.args, plain.exc_text = printable(record.getMessage()), (), None
        return super().format(plain)

    def formatException(self, ei: _ExcInfo) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


class PrintableLog(logging.LoggerAdapter[logging.Logger]):
    """A log in a process that is not ours, whose formatter writes messages as they are."""

    def log(self, level: int, msg: object, *args: Any, **options: Any) -> None:
        """Log a message as one printable line."""
        if self.isEnabledFor(level):
            options.setdefault("stacklevel", 2)  # the caller, not this line
            text = str(msg) % args if args else str(msg)
            super().log(level, "%s", printable(text), **options)


def printable_log(name: str) -> PrintableLog:
    """Return a log for code that runs within an engine."""
    return PrintableLog(logging.getLogger(name), {})


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in printable_lines(text).splitlines())


def write_log_lines(who: str) -> None:
    """Write log lines to stderr: ours from INFO on, those of libraries from WARNING on.

    Nothing waits for the reader of them: see common/line_writing.py.
    """
    handler = logging.StreamHandler(_Stderr())
    handler.setFormatter(LineFormatter(FORM.format(who=printable(who).replace("%", "%%"))))
    handler.addFilter(FewAlike())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("kvatlas").setLevel(logging.INFO)


class _Stderr:
    """What a handler writes to; nothing waits for its reader."""

    def write(self, text: str) -> None:
        write_line(sys.stderr, text.removesuffix("\n"))

    def flush(self) -> None:
        """Called for each line: the end of the process flushes."""


class FewAlike(logging.Filter):
    """Leaves out most of the lines of libraries that repeat, such as one for each bad request.

    Of the same line within a minute the first three are written, and the 10th, the 100th and so on
    with their number. Lines of ours are bounded where they are written.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: (logger, beginning of the line) -> since when it is counted, and how many came; the
        #: newest last, at most MAX_KINDS
        self._seen = OrderedDict[tuple[str, str], tuple[float, int]]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written."""
        if record.name == "kvatlas" or record.name.startswith("kvatlas."):
            return True
        kind = record.name, str(record.msg)[:KIND_CHARS]
        now = self._clock()
        since, count = self._seen.get(kind, (now, 0))
        note = ""
        if now - since >= ALIKE_SECONDS:
            if left_out := count - _num_written(count):
                note = f" ({left_out} alike of {now - since:.0f} s ago were left out)"
            since, count = now, 0
        count += 1
        self._seen[kind] = since, count
        if len(self._seen) > MAX_KINDS:
            self._seen.popitem(last=False)
        if not _is_written(count):
            return False
        if count > ALWAYS_WRITTEN:
            note = f" ({count} alike in {now - since:.0f} s; most are left out)"
        if note:
            record.msg, record.args = f"{record.getMessage()}{note}", None
        return True


def _is_written(count: int) -> bool:
    return count <= ALWAYS_WRITTEN or count == 10 ** (len(str(count)) - 1)


def _num_written(count: int) -> int:
    powers = len(str(count)) - 1 if count else 0
    return min(count, ALWAYS_WRITTEN) + powers
