"""Of a test marked `quick`, which cases are slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import slow


def of_a_test_marked(*marks: pytest.MarkDecorator) -> dict[str, list[str]]:
    """The marks of each case of a test with the cases a, b and c."""
    found = {mark.name: mark.mark for mark in marks}
    cases = [SimpleNamespace(id=name, marks=[]) for name in "abc"]
    definition = SimpleNamespace(get_closest_marker=found.get)
    test: Any = SimpleNamespace(function=of_a_test_marked, definition=definition, _calls=cases)
    list(slow.pytest_generate_tests(test))
    return {case.id: [mark.name for mark in case.marks] for case in cases}


def test_cases_that_quick_does_not_name_are_slow():
    assert of_a_test_marked(pytest.mark.quick("b")) == {"a": ["slow"], "b": [], "c": ["slow"]}
    assert of_a_test_marked(pytest.mark.quick(2)) == {"a": [], "b": ["slow"], "c": []}
    assert of_a_test_marked(pytest.mark.parametrize("x", "abc")) == {"a": [], "b": [], "c": []}


def test_cases_that_quick_names_and_a_test_lacks_are_told():
    with pytest.raises(pytest.UsageError) as error:
        of_a_test_marked(pytest.mark.quick("b", "e", "d"))
    assert str(error.value) == "of_a_test_marked has no cases ['d', 'e'], which its mark `quick` names"
