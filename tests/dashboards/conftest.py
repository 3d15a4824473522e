"""Tests with a real W&B server and a real browser: skipped where those are missing, unless they are required."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

REQUIRED = "QKEXP_REQUIRE_DASHBOARDS"


@pytest.fixture(scope="session")
def need() -> Callable[[object, str], None]:
    """``need(found, what)``: skip where something is missing, naming it; fail where all is required."""

    def check(found: object, what: str) -> None:
        if not found:
            end = pytest.fail if os.environ.get(REQUIRED) == "1" else pytest.skip
            end(f"missing: {what}; make test-dashboards installs it")

    return check
