"""docs/faults.md has every number, names tests that exist, and names those that carry a number."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "faults.md").read_text()
NUMBERS = range(1, 81)
#: about restart, gap, replay, snapshot, leak, purge, cursor, replica: a test has their number
NUMBERED = {*range(1, 18), 20, 21, 23, 33, 34, 36, 60, 68, 69, 71, 74, 76, 77, 78}

LINES = {
    int(number): held for number, held in re.findall(r"^\| F(\d+) \|.*\| (.+) \|$", PAGE, re.M)
}
NAMED = re.compile(r"`([a-z]+/test_\w+\.py)::(test_\w+)`")


@cache
def names_in(file: Path) -> set[str]:
    """Return the names of a file's tests, those in classes included."""
    tree = ast.parse(file.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name for function in functions if function.name.startswith("test_")}


def numbers_of(test: str) -> set[int]:
    """Return the numbers in a test's name: of test_f3_... and of ..._f3_f4."""
    return {int(number) for number in re.findall(r"(?<=_)f(\d+)(?=_|$)", test)}


def test_every_number_has_its_line_once() -> None:
    assert [int(number) for number in re.findall(r"^\| F(\d+) \|", PAGE, re.M)] == [*NUMBERS]
    assert set(LINES) == {*NUMBERS}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_line_names_tests_that_exist_or_why_there_is_none(number: int) -> None:
    named = NAMED.findall(LINES[number])
    assert bool(named) != LINES[number].startswith("not ours: ")
    for file, test in named:
        assert test in names_in(TESTS / file), f"{file}::{test}"


@pytest.mark.parametrize("number", sorted(NUMBERED))
def test_what_is_promised_has_a_test_of_its_number(number: int) -> None:
    assert number in set().union(*(numbers_of(test) for _, test in NAMED.findall(LINES[number])))


def test_numbers_are_found_in_names() -> None:
    assert numbers_of("test_f3_f14_a_gap") == {3, 14}
    assert numbers_of("test_a_gap_is_replayed_f3_f4") == {3, 4}
    assert numbers_of("test_half_of_12") == set()
