"""Chromium for the tests of pages: the distribution's, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

REQUIRED = os.environ.get("QKEXP_REQUIRE_DASHBOARDS") == "1"


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser; the test is skipped, or fails where dashboards are required, if something is missing."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if sync_playwright is None:
        missing("the Python package playwright (pip install 'qkexp[test-dashboards]')")
    if path is None:
        missing("Chromium (apt-get install chromium)")
    with sync_playwright() as started:
        # --no-sandbox: as root in a container Chromium starts no other way; the pages are our own
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def missing(what: str) -> None:
    """Skip, naming what is not installed; fail where it must be."""
    text = f"not installed: {what}; make test-dashboards installs or names it"
    if REQUIRED:
        pytest.fail(text)
    pytest.skip(text)
