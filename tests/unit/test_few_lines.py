"""Few lines about what others can send as often as they like."""

import logging

import pytest

from kvatlas.common.few_lines import FewLines


def test_the_number_of_lines_grows_by_one_with_each_power_of_ten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = FewLines(logging.getLogger("few"))
    for number in range(1, 25_001):
        lines.warn("%s is nothing", number)
    assert [record.getMessage() for record in caplog.records] == [
        f"{10**power} is nothing ({10**power} in all)" for power in range(5)
    ]
    assert lines.num_lines == 25_000
