"""Who serves which model: lists that change only where the fleet does."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import attrgetter

from kvatlas.indexer.reader import InstanceView
from kvatlas.schemas.fleet import WorkerInfo
from kvatlas.schemas.ids import InstanceId

_instance = attrgetter("instance")


class WorkersByModel:
    """For each model and adapter, who serves it, by name.

    Lists are replaced, never changed: whoever got one may keep it, and knows by identity that
    nothing has changed. What nobody serves costs no more than what somebody does.
    """

    def __init__(self) -> None:
        #: those that are up and not gone
        self._views: dict[InstanceId, InstanceView] = {}
        #: None while they have to be made anew
        self._lists: dict[str, list[InstanceView]] | None = None

    def of(self, model: str) -> list[InstanceView]:
        """Return who serves a model or adapter."""
        if self._lists is None:
            self._lists = _listed(self._views)
        return self._lists.get(model, [])

    def update(self, changed: Iterable[tuple[InstanceId, InstanceView | None]]) -> None:
        """Take in how instances look from now on, None for those that are forgotten."""
        lists, fresh = self._lists, dict[str, list[InstanceView]]()
        for name, view in changed:
            before = self._views.pop(name, None)
            if view is not None and view.info is not None:
                self._views[name] = view
            elif before is None:
                continue
            if before is None or view is None or not _is_unchanged(before.info, view.info):
                lists = None
            if lists is None or view is None:
                continue
            for model in _served(view):
                if model not in fresh:
                    fresh[model] = list(lists[model])
                fresh[model][bisect_left(fresh[model], name, key=_instance)] = view
        if lists is not None:
            lists |= fresh
        self._lists = lists

    def replace(self, views: Iterable[InstanceView]) -> None:
        """Begin anew with these."""
        self._views = {view.instance: view for view in views if view.info is not None}
        self._lists = None


def _listed(views: Mapping[InstanceId, InstanceView]) -> dict[str, list[InstanceView]]:
    lists: dict[str, list[InstanceView]] = {}
    for name in sorted(views):
        for model in _served(views[name]):
            lists.setdefault(model, []).append(views[name])
    return lists


def _served(view: InstanceView) -> set[str]:
    return set() if view.info is None else {*view.info.models, *view.info.adapters}


def _is_unchanged(before: WorkerInfo | None, now: WorkerInfo | None) -> bool:
    return before is now or before == now
