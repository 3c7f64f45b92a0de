"""What every test needs: the scenarios of tests/cases beside the real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launching import CASES


@pytest.fixture(scope="session", autouse=True)
def _cases() -> Iterator[None]:
    """Let this process know the scenarios of the tests, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSRANK_SCENARIOS", str(CASES))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
