"""What real entry points hand to the parts that act on it: spies on constructors, not stand-ins."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest


class Seen(Exception):
    """A part was about to be made, which is as far as a look needs to go."""


class Arrivals:
    """Arguments of all calls, by `part.parameter` and the attributes of what is given for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        #: by part: the arguments of each call
        self._calls: dict[str, list[Mapping[str, Any]]] = {}

    def given(self, path: str) -> list[Any]:
        """Return what was given, call by call, such as for `Outbox.max_bytes`."""
        part, parameter, *attributes = path.split(".")
        given = [call[parameter] for call in self._calls.get(part, ())]
        for name in attributes:
            given = [getattr(value, name) for value in given if value is not None]
        return given

    def spy(self, module: Any, name: str, stop: Exception | None = None) -> None:
        """Note each call of a module's `name`; it raises `stop` instead of going on, if given."""
        real: Callable[..., Any] = getattr(module, name)
        signature = inspect.signature(real)

        def called(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self._calls.setdefault(name, []).append(bound.arguments)
            if stop is not None:
                raise stop
            return real(*args, **kwargs)

        self._patch.setattr(module, name, called)
