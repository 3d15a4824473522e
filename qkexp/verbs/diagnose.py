"""What went wrong in a run, or in every run of a sweep: onsets, their order, a verdict."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from qkexp.config import UserError
from qkexp.verbs.terminal import DONE, directory_of, err, out

if TYPE_CHECKING:
    from rich.table import Table

    from qkexp.analysis.diagnose import Diagnosis
    from qkexp.record.load import Sweep

HELP = "which link of the chain broke first, and whether attention was at fault"
EXAMPLE = "qkexp diagnose outputs/vit22b"
STYLE = {"healthy": "green", "attention": "red", "inconclusive": "dim"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a run directory, or a sweep's")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(options: argparse.Namespace) -> int:
    from rich.progress import track

    from qkexp.analysis.diagnose import as_dict, diagnose
    from qkexp.analysis.figures.selection import DoesNotFit
    from qkexp.analysis.figures.style import save
    from qkexp.record.files import write_json
    from qkexp.record.load import load_run, load_sweep

    directory = directory_of(options.directory)
    single = (directory / "config.yaml").is_file()
    sweep = beside(directory.resolve()) if single else load_sweep(directory)
    runs = [load_run(directory.resolve())] if single else list(sweep.all.values())
    found = [diagnose(r, sweep) for r in track(runs, "diagnosing", console=err, transient=True)]
    write_json(directory / "diagnosis.json", {"runs": [as_dict(d) for d in found]})
    if options.json:
        print(json.dumps({"runs": [as_dict(d) for d in found]}, indent=1, allow_nan=False))
        return DONE
    if single:
        tell(found[0])
        from qkexp.analysis.figures.timeline import of_run

        try:
            out.print(f"figure: {save(of_run(found[0]), directory / 'figures', 'timeline')}", soft_wrap=True)
        except DoesNotFit as reason:
            err.print(f"no timeline: {reason}", markup=False, soft_wrap=True)
    else:
        out.print(table(found))
        counts = {v: sum(d.verdict == v for d in found) for v in dict.fromkeys(d.verdict for d in found)}
        out.print(f"{directory}: " + ", ".join(f"{n} {v}" for v, n in counts.items()), soft_wrap=True)
    out.print(f"all numbers: {directory / 'diagnosis.json'}", soft_wrap=True)
    return DONE


def beside(run: Path) -> Sweep:
    """The sweep that a run lies in; itself alone where the plan there names no run that exists."""
    from qkexp.record.load import Sweep, load_run, load_sweep

    try:
        return load_sweep(run.parent)
    except UserError:
        return Sweep(run.parent, {run.name: load_run(run)})


def tell(d: Diagnosis) -> None:
    """Verdict, evidence, onsets and order of one run."""
    out.print(f"{d.name}: [bold {STYLE.get(d.verdict, 'yellow')}]{d.verdict}[/]", soft_wrap=True)
    for text in d.words:
        out.print(f"  {text}", markup=False, soft_wrap=True)
    for c in d.compared:
        out.print(f"  {c.text}", markup=False, soft_wrap=True)
    for text in d.notes:
        out.print(f"  note: {text}", markup=False, soft_wrap=True)
    if d.evidence.onsets:
        out.print(onset_table(d))


def onset_table(d: Diagnosis) -> Table:
    """A row a link: interval, layer and head, against the other arm, and what it came before."""
    from rich.table import Table

    from qkexp.analysis.diagnose import interval
    from qkexp.analysis.onsets import BY_LINK

    e = d.evidence
    made = Table(title="onsets (steps), over the grid of thresholds", title_justify="left")
    for column in ("link", "onset", "layer", "head", *(("against the other arm",) if e.other else ()), "before"):
        made.add_column(column, justify="right" if column in ("layer", "head") else "left", overflow="fold")
    for name, onset in e.onsets.items():
        place = [str(v) if v >= 0 else "-" for v in (onset.layer, onset.head)]
        parted = [interval(e.parted[name]) if name in e.parted else "-"] if e.other else []
        later = ", ".join(b for a, b in d.order if a == name)
        made.add_row(f"{name}: {BY_LINK[name].words}", interval(onset), *place, *parted, later)
    return made


def table(found: list[Diagnosis]) -> Table:
    """A row a run: its verdict, and what speaks for it."""
    from rich.table import Table

    made = Table(title="diagnosis", title_justify="left")
    for column in ("run", "verdict", "evidence"):
        made.add_column(column, overflow="fold")
    for d in found:
        said = d.words[-1:] if d.verdict == "healthy" else d.words  # of a healthy run, how it ended
        texts = [*said, *(c.text for c in d.compared), *d.notes]
        made.add_row(d.name, f"[{STYLE.get(d.verdict, 'yellow')}]{d.verdict}[/]", "; ".join(texts))
    return made
