"""Digests that an idle worker repeats, folded into one line each. Pure."""

from collections.abc import Iterator


class DigestLines:
    """Keeps back the lines of digests that confirm what is held, until something else is told.

    A line goes out once with how often it came, behind whatever others said meanwhile.
    """

    def __init__(self) -> None:
        #: instance -> line of its digest -> where it stood first and last, and how often
        self._waiting: dict[tuple[str, int], dict[str, tuple[str, str, int]]] = {}

    def put(self, instance: tuple[str, int], where: str, line: str) -> None:
        """Take one digest that is as expected."""
        waiting = self._waiting.setdefault(instance, {})
        first, _, count = waiting.get(line, (where, where, 0))
        waiting[line] = first, where, count + 1

    def end(self, instance: tuple[str, int]) -> Iterator[str]:
        """Yield what was kept back of an instance, in the order in which it began."""
        for line, (first, last, count) in self._waiting.pop(instance, {}).items():
            more = f" (x {count}, the last in {last.rpartition(' ')[2]})" if count > 1 else ""
            yield f"{first}: {line}{more}"

    def end_all(self) -> Iterator[str]:
        """Yield all that was kept back."""
        for instance in tuple(self._waiting):
            yield from self.end(instance)
