"""Names in the texts of errors: which one may have been meant, and a few that are known."""

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence

MAX_NAMES = 8
MAX_NAME_CHARS = 64


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is spelt nearly so, None where none is."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None)


def known_instead(name: str, known: Collection[str]) -> str:
    """Return what is to be said of an unknown name: the one that is near, or those there are."""
    near = near_name(name, known)
    return f"did you mean {near}?" if near else f"known are {', '.join(sorted(known))}"


def few_names(names: Sequence[str]) -> str:
    """Return the first of the names, each quoted and cut, and how many more there are."""
    return few(names, lambda name: repr(name[:MAX_NAME_CHARS]))


def few(texts: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """Return the first of the texts as they are shown, and how many more there are."""
    first, left_out = ", ".join(map(shown, texts[:MAX_NAMES])), len(texts) - MAX_NAMES
    return f"{first} and {left_out} more" if left_out > 0 else first
