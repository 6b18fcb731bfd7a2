"""The tests of a row are read, and the program is found in a response."""

import json
from typing import Any

import pytest

from rollout.environments.sandbox.hidden_tests import Case, program_in, read_cases


def test_all_forms_of_tests_are_read_from_a_list_or_its_json() -> None:
    tests: list[Any] = [
        {"input": "1\n", "output": "2"},
        {"call": "f(1)", "output": "2"},
        {"code": "assert f"},
        "assert g",
    ]
    cases = [
        Case(input="1\n", output="2"),
        Case(call="f(1)", output="2"),
        Case(code="assert f"),
        Case(code="assert g"),
    ]
    assert read_cases(tests) == read_cases(json.dumps(tests)) == cases


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        (None, "must be a list of tests, at least one; the row has None"),
        ([], "must be a list of tests, at least one"),
        ("{", "is a text, and not JSON"),
        ([{"input": "1", "output": 2}], 'test 1 must have {"input", "output"}'),
        ([{"call": "f(1)"}], "test 1 must have"),
    ],
)
def test_a_row_without_proper_tests_is_refused(tests: Any, problem: str) -> None:
    with pytest.raises(ValueError, match="column 'tests': ") as refusal:
        read_cases(tests)
    assert problem in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nfirst\n```\nNo, rather:\n```py\nlast\n```\nDone.", "last\n"),
        ("```\nopen", "```\nopen"),
    ],
)
def test_the_program_is_the_last_block_or_everything(text: str, program: str) -> None:
    assert program_in(text) == program
