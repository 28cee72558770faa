"""What a validator says of a body or query, as an error that names the field and what it takes.

Object contains unknown field `prompt`      --> prompt: unknown field; did you mean token_ids?
Invalid enum value 'exakt' - at `$.require` --> require: invalid enum value 'exakt'; allowed ...
"""

import re
from collections.abc import Iterable
from typing import Any

from msgspec import inspect

from kvatlas.schemas.errors import InvalidRequest
from kvatlas.schemas.known_names import MAX_NAME_CHARS, known_instead

#: what others call a field of ours; the first that a body has is meant
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("token_ids",),
    "prompt_token_ids": ("token_ids",),
    "input_ids": ("token_ids",),
    "tokens": ("token_ids",),
    "token_ids_b64": ("tokens",),
}

_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_NAMED = re.compile(r"^Object (?:contains unknown|missing required) field `(.*)`", re.DOTALL)


def at_field(message: str, kind: Any) -> InvalidRequest:
    """Return a validator's message with its field: `token_ids[3]: expected int, got str`.

    `kind` is what was to be read.
    """
    found = _PATH.search(message)
    problem = message[: found.start()] if found else message
    path = found[1] if found else ""
    parts = [path] if path else []
    if named := _NAMED.match(problem):
        parts.append(named[1][:MAX_NAME_CHARS])
        is_unknown = "unknown" in problem
        problem = "required field is missing"
        if is_unknown:
            problem = f"unknown field; {_instead(named[1], _fields(_type_at(kind, path)))}"
    elif problem.startswith("Invalid enum value"):
        problem = f"{problem}; allowed are {', '.join(_values(_type_at(kind, path)))}"
    return InvalidRequest(".".join(parts) or "body", problem[:1].lower() + problem[1:])


def _instead(name: str, known: list[str]) -> str:
    meant = next((each for each in OTHER_NAMES.get(name, ()) if each in known), None)
    return f"did you mean {meant}?" if meant else known_instead(name[:MAX_NAME_CHARS], known)


def _type_at(kind: Any, path: str) -> inspect.Type:
    """Return the type of what stands at a path such as `extras[0].kind`."""
    found = inspect.type_info(kind)
    for name in re.findall(r"[^.\[\]]+", path):
        if isinstance(found, inspect.StructType):
            found = _bare(next(each.type for each in found.fields if each.encode_name == name))
        elif isinstance(found, inspect.CollectionType):
            found = _bare(found.item_type)
    return found


def _bare(found: inspect.Type) -> inspect.Type:
    """Return a type without its metadata, and without the None that may stand instead."""
    if isinstance(found, inspect.Metadata):
        return _bare(found.type)
    if isinstance(found, inspect.UnionType):
        return _bare(next(each for each in found.types if not isinstance(each, inspect.NoneType)))
    return found


def _fields(found: inspect.Type) -> list[str]:
    return (
        [each.encode_name for each in found.fields] if isinstance(found, inspect.StructType) else []
    )


def _values(found: inspect.Type) -> Iterable[str]:
    if isinstance(found, inspect.EnumType):
        return [repr(each.value) for each in found.cls]
    return [repr(each) for each in found.values] if isinstance(found, inspect.LiteralType) else []
