"""The page: template, style, scripts, Plotly and data in one file that needs nothing else."""

from __future__ import annotations

import base64
import gzip
from functools import cache
from html import escape
from importlib.resources import files

# in this order: later ones use what earlier ones define
SCRIPTS = ("dom", "data", "theme", "chart", "view", "rate", "panels", "maps", "table", "overview", "run", "app")


def page(name: str, payload: bytes, *, live: bool = False) -> str:
    """HTML of a report.

    Args:
        name: the sweep's, for the title.
        payload: as :meth:`qkexp.analysis.report.data.Reader.payload` makes it.
        live: served by ``qkexp serve``: the page then asks its server, and nobody else, for news.
    """
    parts = {
        "TITLE": escape(name),
        "CONNECT": "'self'" if live else "'none'",
        "LIVE": "true" if live else "false",
        "STYLE": _text("report.css"),
        "PLOTLY": _plotly(),
        "DATA": base64.b64encode(payload).decode(),
        "SCRIPT": "\n".join(_text(f"{script}.js") for script in SCRIPTS),
    }
    before, *rest = _text("page.html").split("@@")
    return before + "".join(parts[text] if i % 2 == 0 else text for i, text in enumerate(rest))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """plotly.js, compressed: two megabytes instead of five. A browser without ``DecompressionStream`` is told so."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
