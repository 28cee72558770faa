"""Entry point of `kvatlas` and `python -m kvatlas`; light until a command is chosen."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        import kvatlas.bridge_command
        import kvatlas.dead_letters_command
        import kvatlas.engine_commands
        import kvatlas.settings_command  # noqa: F401 - registers its command
        from kvatlas.commands import run_command
    except ModuleNotFoundError as error:
        print(f"{error}: pip install 'kvatlas[cli]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before a command could deal with it
        return 130
    return run_command(arguments)


if __name__ == "__main__":
    sys.exit(main())
