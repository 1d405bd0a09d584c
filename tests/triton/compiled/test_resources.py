"""Every configuration that a dispatch can choose, compiled for every chip."""

from __future__ import annotations

import pytest
from resources import CHIPS, REPORT, configurations, faults, measure, modules

TABLE = [c for module in modules() for c in configurations(module)]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("configuration", TABLE, ids=[c.name for c in TABLE])
def test_compiles_within_the_limits(configuration, chip):
    """D1 20, D1 21: no spill, no float64, full-width loads, the chip's matrix instructions."""
    found = measure(configuration, chip)
    assert not faults(configuration, chip, found), found


def test_names_are_unique():
    names = [c.name for c in TABLE]
    assert len(set(names)) == len(names)


def test_the_report_lists_every_configuration():
    """Otherwise: `python bench/resources.py --write`."""
    text = REPORT.read_text(encoding="utf-8")
    listed = {line.split(" | ")[0][2:] for line in text.splitlines() if line.startswith("| ")}
    assert listed - {"kernel"} == {c.name for c in TABLE}
