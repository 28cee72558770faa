"""Entry point of `kvatlas` and `python -m kvatlas`; light until a command is chosen."""

import sys
from collections.abc import Sequence
from traceback import format_exception
from types import TracebackType

from kvatlas.common.line_writing import write_line
from kvatlas.schemas.printable import printable, printable_lines
from kvatlas.worker_hooks.sidecar.stop_deadline import limit_stop

#: what a role may take to stop, with the processes that it has started; more than any of these
STOP_SECONDS = 60.0


def _say_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an error of the program itself as Python does, without control characters or secrets.

    Its text may repeat an address with a password, or a name that somebody else chose.
    """
    write_line(sys.stderr, printable_lines("".join(format_exception(kind, error, traceback))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if arguments is None:
        sys.excepthook = _say_uncaught
    try:
        import kvatlas.cli.bridge
        import kvatlas.cli.dead_letters
        import kvatlas.cli.quarantine
        import kvatlas.cli.recordings
        import kvatlas.cli.settings  # noqa: F401 - registers its command
        from kvatlas.cli.commands import run_command
    except ModuleNotFoundError as error:
        print(printable(f"{error}: pip install 'kvatlas[cli]'"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before a command could deal with it
        return 130
    given = sys.argv[1:] if arguments is None else arguments
    limit_stop(" ".join(["kvatlas", *given[:1]]), STOP_SECONDS)
    return run_command(arguments)


if __name__ == "__main__":
    sys.exit(main())
