"""Data as users have it, tiny."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def image_folder() -> Callable[..., Path]:
    """Fills a root with tiny JPEGs of two classes and several shapes, in ImageNet's layout."""

    def fill(root: Path, train: int = 8, val: int = 2) -> Path:
        draw = np.random.default_rng(2)
        for part, n in (("train", train), ("val", val)):
            for number, name in enumerate(("n01", "n02")):
                folder = root / part / name
                folder.mkdir(parents=True)
                for i in range(n):
                    pixels = draw.integers(0, 256, (20 + i, 24, 3), np.uint8) // 2 + 100 * number
                    Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.jpg")
        return root

    return fill
