"""A reader of shared memory says what the writer's own index says, whatever happens."""

import tempfile
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.events.bus import Message
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import stimulus_of
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.publication import IndexPublication, WriterStatus
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.indexer.reader import IndexReader
from testkit.builders import hashes
from testkit.histories import Step, histories, publish
from testkit.indexes import tiny_index


@given(histories, st.integers(1, 9))
def test_a_reader_answers_what_the_writer_would(history: list[Step], first: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        arrays = SharedArrays(Path(name))
        state = IndexState(tiny_index(arrays=arrays))
        publication = IndexPublication(arrays, state, state)
        reader = SharedIndexReader(Path(name))
        publication.publish_status(_pulse())
        for at, (subject, payload) in enumerate(publish(history), 1):
            message = Message(at, subject, payload, at)
            with publication:
                state.handle(stimulus_of(message))
            chain = hashes(first, first + 1, first + 2)
            assert reader.match(chain) == state.match(chain)
            assert reader.holders(hashes(first)) == state.holders(hashes(first))
            assert reader.stream_sequence == state.stream_sequence
            assert _looks(reader) == _looks(state)
        publication.publish_status(_pulse())
        assert reader.instances() == state.instances()
        assert reader.stats() == state.stats()
        assert reader.state_digest() == state.state_digest()
        assert _looks(reader) == _looks(state)
        assert reader.num_retries == 0
        arrays.close()


def _looks(index: IndexReader) -> list[tuple[object, ...]]:
    """Return what of those that serve is as of now; the rest is of when a view was made."""
    serving = index.serving("model")
    return [(v.instance, v.epoch, v.info, v.trust, v.muted) for v in serving]


def _pulse() -> WriterStatus:
    return WriterStatus(True, True, 0, time.monotonic(), {})
