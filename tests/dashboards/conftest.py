"""Tests with a real W&B server and a real browser: skipped where those are missing, unless they are required."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from browser import missing


@pytest.fixture(scope="session")
def need() -> Callable[[object, str], None]:
    """``need(found, what)``: skip where something is missing, naming it; fail where all is required."""

    def check(found: object, what: str) -> None:
        if not found:
            missing(what)

    return check
