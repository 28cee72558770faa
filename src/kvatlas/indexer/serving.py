"""Who serves which model: lists that change only where the fleet does."""

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter

from kvatlas.indexer.reader import InstanceView
from kvatlas.schemas.fleet import WorkerInfo
from kvatlas.schemas.ids import InstanceId

_instance = attrgetter("instance")


class ServingLists:
    """For each model and adapter that was asked for, who serves it, by name.

    Lists are replaced, never changed: whoever got one may keep it, and knows by identity that
    nothing has changed.
    """

    def __init__(self) -> None:
        #: those that are up and not gone
        self._views: dict[InstanceId, InstanceView] = {}
        self._lists: dict[str, list[InstanceView]] = {}

    def of(self, model: str) -> list[InstanceView]:
        """Return who serves a model or adapter."""
        found = self._lists.get(model)
        if found is None:
            serving = (view for view in self._views.values() if model in _served(view))
            found = sorted(serving, key=_instance)
            if found:  # whatever is asked for that nobody serves would stay for ever
                self._lists[model] = found
        return found

    def update(self, changed: Iterable[tuple[InstanceId, InstanceView | None]]) -> None:
        """Take in how instances look from now on, None for those that are forgotten."""
        fresh: dict[str, list[InstanceView]] = {}
        for name, view in changed:
            before = self._views.pop(name, None)
            if view is not None and view.info is not None:
                self._views[name] = view
            elif before is None:
                continue
            if before is None or view is None or not _is_alike(before.info, view.info):
                self._lists.clear()
                fresh.clear()
                continue
            for model in _served(view) & self._lists.keys():
                if model not in fresh:
                    fresh[model] = list(self._lists[model])
                fresh[model][bisect_left(fresh[model], name, key=_instance)] = view
        self._lists |= fresh

    def replace(self, views: Iterable[InstanceView]) -> None:
        """Begin anew with these."""
        self._views = {view.instance: view for view in views if view.info is not None}
        self._lists.clear()


def _served(view: InstanceView) -> set[str]:
    return set() if view.info is None else {*view.info.models, *view.info.adapters}


def _is_alike(before: WorkerInfo | None, now: WorkerInfo | None) -> bool:
    return before is now or before == now
