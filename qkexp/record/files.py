"""Small files that other processes read while they are written: replaced whole, and read with patience."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where the file is absent, torn or something else."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole, so that no reader sees half of it."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # its own, also beside other hosts
    part.write_text(text)
    part.replace(path)
