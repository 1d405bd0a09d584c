"""The table of reports in docs/field_notes.md names tests that exist and that carry the report."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "field_notes.md"
ROW = re.compile(r"^\| (?P<label>[A-Za-z]*#?\d+) \| (?P<what>.+) \| (?P<tests>.+) \|$", re.M)


def docstring(test: str) -> str | None:
    """The docstring of `file::name`, "" without one, None where there is no such test."""
    file, _, name = test.partition("::")
    path = TESTS / file
    if not path.is_file():
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
    return None


def test_every_row_names_tests_that_carry_its_label():
    rows = [match.groupdict() for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))]
    assert len(rows) > 70
    wrong = []
    for row in rows:
        tests = re.findall(r"`([^`]+)`", row["tests"])
        assert tests, f"{row['label']} names no test"
        for test in tests:
            text = docstring(test)
            if text is None or not re.search(re.escape(row["label"]) + r"(?!\d)", text):
                wrong.append(f"{row['label']}: {test}")
    assert not wrong, wrong


def test_every_report_of_the_kinds_is_listed():
    found = {match["label"] for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
    numbers = {
        "R": [1, 2, 3, 4, 5, 6, 8, 9, 10, 11],
        "A": [1, 3, 4, 5, 7, 8, 9, 10],
        "N": [2, 3, 4],
        "G": [1, 2],
        "M": [1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 13],
        "B": range(1, 10),
        "P": [1, 3, 4],
        "L": [1, 2, 3, 4, 5, 6, 7, 9],
    }
    expected = {f"{letter}{n}" for letter, list_ in numbers.items() for n in list_}
    assert expected <= found, expected - found
