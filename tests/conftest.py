"""What every test needs: the scenarios of tests/cases beside the real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.watch.digests import hashing
from tests.launching import CASES


@pytest.fixture(scope="session", autouse=True)
def _cases() -> Iterator[None]:
    """Let this process know the scenarios of the tests, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSRANK_SCENARIOS", str(CASES))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def products(monkeypatch):
    """Digests as they are where the package xxhash is not installed."""
    monkeypatch.setattr(hashing, "xxh3", None)


@pytest.fixture(params=["xxh3", "products"])
def method(request):
    """Digests made in each of the two ways."""
    if request.param == "products":
        request.getfixturevalue("products")
    elif hashing.xxh3 is None:
        pytest.skip("the package xxhash is not installed")
    return request.param
