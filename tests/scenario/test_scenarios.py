"""Compares; `pytest tests/scenario --rewrite` accepts. Commit only what you understand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas.indexer import FlatRadixIndex, PrefixIndex, ReferenceIndex
from testkit.index_scenario import IndexScenario
from testkit.scenario import replay

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("make_index", [ReferenceIndex, FlatRadixIndex])
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(
    path: Path, make_index: Callable[[], PrefixIndex], request: pytest.FixtureRequest
) -> None:
    now = replay(path.read_text(), IndexScenario(make_index()))
    if request.config.getoption("--rewrite"):
        path.write_text(now)
    assert now == path.read_text()
