"""Documents with generated tables between ``<!-- generated: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

Tables = Mapping[str, Callable[[], str]]


def regenerated(text: str, tables: Tables) -> str:
    """The document with these tables made anew."""
    for name, table in tables.items():
        before, marker, rest = text.partition(f"<!-- generated: {name} -->\n")
        text = before + marker + table() + "\n" + rest[rest.index("<!-- end -->") :]
    return text


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a bar inside of a cell is escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(script: str, description: str, document: Path, tables: Tables, measured: Tables | None = None) -> int:
    """Rewrite the tables in place; with ``--check`` only say whether they differ, ``measured`` ones left out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the tables differ")
    old = document.read_text()
    if parser.parse_args().check:
        same = regenerated(old, tables) == old
        print("tables are up to date" if same else f"{document.name} differs: run python scripts/{script}")
        return int(not same)
    document.write_text(regenerated(old, {**tables, **(measured or {})}))
    return 0
