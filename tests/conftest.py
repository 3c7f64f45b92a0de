"""What every test needs: the scenarios of tests/cases beside the real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launching import CASES


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests that share a run of real ranks share a worker, so that the run is made once."""
    for item in items:
        shared = _shared(item)
        if shared is not None:
            item.add_marker(pytest.mark.xdist_group(shared))


def _shared(item: pytest.Item) -> str | None:
    """Return a name for what a test shares with others, or None if it stands alone."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return None
    params = getattr(getattr(item, "callspec", None), "params", {})
    found = None
    for name, (*_, fixture) in info.name2fixturedefs.items():
        if fixture.scope not in ("module", "package") or not fixture.baseid:
            continue
        found = found or item.nodeid.split("::")[0]
        if fixture.params:
            # One run for each of its parameters.
            found = f"{found}[{params.get(name)}]"
    return found


@pytest.fixture(scope="session", autouse=True)
def _cases() -> Iterator[None]:
    """Let this process know the scenarios of the tests, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSRANK_SCENARIOS", str(CASES))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
