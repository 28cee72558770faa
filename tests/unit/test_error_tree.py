"""The tree at the head of schemas/errors.py, held to the classes."""

import inspect
import re

from kvatlas.schemas import errors
from kvatlas.schemas.errors import KvatlasError


def drawn(text: str) -> dict[str, str]:
    """Return each error of a tree and the one that it is a kind of, empty for the root."""
    found: dict[str, str] = {}
    above: list[str] = []
    for indent, name in re.findall(r"^((?:  )*)(\w+)(?: {2,}\S.*)?$", text, re.MULTILINE):
        del above[len(indent) // 2 :]
        found[name] = above[-1] if above else ""
        above.append(name)
    return found


def test_every_error_stands_in_the_tree_below_its_kind() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, KvatlasError)
    ]
    raised = {kind.__name__: kind.__mro__[1].__name__ for kind in kinds}
    assert drawn(errors.__doc__ or "") == {**raised, "KvatlasError": ""}
