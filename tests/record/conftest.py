"""Tests here must neither find the user's login nor reach a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_account(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.fixture(scope="module", autouse=True)
def _service() -> Iterator[None]:
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
