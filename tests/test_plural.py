"""Numbers with what they count."""

from __future__ import annotations

import pytest

from harness.plural import number_of


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (11, "11 ranks")]
)
def test_only_one_is_one(count, told):
    assert number_of(count, "rank") == told
