"""Who served which model lately, for what is said of a model that nobody serves now.

A model whose workers have all gone may come back, and one that was never heard of is a typing
error: to whoever asks these are two different things.
"""

from collections import OrderedDict

from kvatlas.indexer.reader import IndexReader, InstanceView
from kvatlas.schemas.errors import NoCandidate, UnknownModel
from kvatlas.schemas.known_names import few

#: models whose last workers are remembered
MAX_SERVED_MODELS = 256
#: of the reason why a worker is gone, which it may have given itself
MAX_REASON_CHARS = 128


class ServedModels:
    """Remembers of the models that were asked for who served them last; bounded, in memory only."""

    def __init__(self, index: IndexReader) -> None:
        self._index = index
        self._last: OrderedDict[str, list[InstanceView]] = OrderedDict()
        #: as of this version of the fleet. A fleet that stands still is asked once: whoever asks in
        #: vain may ask often
        self._version = -1
        self._served: tuple[str, ...] | None = None
        self._gone: dict[str, str] = {}

    def note(self, model: str, serving: list[InstanceView]) -> None:
        """Take in who serves a model or adapter now, which is not empty. O(1)."""
        self._last[model] = serving
        self._last.move_to_end(model)
        if len(self._last) > MAX_SERVED_MODELS:
            self._last.popitem(last=False)

    def no_worker_error(self, model: str) -> UnknownModel | NoCandidate:
        """Return the error of a model that nobody serves.

        NoCandidate if somebody served it last whom the index remembers as gone, else UnknownModel.
        O(instances) once in each version of the fleet.
        """
        if self._version != self._index.fleet_version:
            self._version, self._served = self._index.fleet_version, None
            self._gone.clear()
        if model in self._last and model not in self._gone:
            self._gone[model] = self._gone_workers(self._last[model])
        if gone := self._gone.get(model):
            return NoCandidate(model, f"who served it is gone: {gone}")
        if self._served is None:
            infos = [view.info for view in self._index.instances() if view.info is not None]
            names = {name for info in infos for name in (*info.models, *info.adapters)}
            self._served = tuple(sorted(names))
        return UnknownModel(model, self._served)

    def _gone_workers(self, last: list[InstanceView]) -> str:
        """Return those that are gone and why, empty where none is known to be."""
        views = (self._index.instance(was.instance) for was in last)
        return few([_gone(view) for view in views if view is not None and view.info is None])


def _gone(view: InstanceView) -> str:
    why = "; ".join(view.trust_reasons) or "begun anew, not introduced yet"
    return f"{view.instance} ({why[:MAX_REASON_CHARS]})"
