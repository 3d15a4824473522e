"""Speed, as ratios that are measured side by side in one process; absolute times depend on the machine's mood.

    python scripts/bench.py                                        # everything, about 15 minutes on two cores
    python scripts/bench.py step probe --sizes micro --quick       # a smoke test
    python scripts/bench.py train                                  # placements, precisions, accumulation, the loop
    python scripts/bench.py variants                               # each attention preset beside none
    python scripts/bench.py sweep --sweep outputs/vit22b --json bench.json

Sections: ``step`` (against timm's own attention), ``probe`` (what telemetry costs), ``rate`` (against the
machine's matrix products), ``train`` (what choices of the loop cost), ``variants`` (what each attention preset costs),
``sweep`` (a stored sweep against its ideal wall time), ``figures`` and ``report`` (of large stored sweeps),
``mirror`` (what copying to W&B costs training). Targets are printed next to the figures and never change the exit code.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from benchmarks.figures import figure_figures
from benchmarks.mirroring import mirror_figures
from benchmarks.report import report_figures
from benchmarks.resuming import resume_figures
from benchmarks.sections import probe_figures, rate_figures, step_figures, sweep_figures
from benchmarks.timing import Figure
from benchmarks.training import train_figures
from benchmarks.variants import variant_figures
from benchmarks.workloads import SIZES, Effort
from rich.console import Console
from rich.table import Table

from qkexp.sweep.job import prepare_cpu
from qkexp.sweep.launch import cores

DEFAULT_SWEEP = Path("outputs/vit22b")

MEANING = {
    "step": "step: time of timm's own model with its fused attention / time of ours; forward in BF16, loss, backward, "
    "Adam on both sides, alternating; median of pairs.",
    "probe": "probe: time of a training step that measures everything and stores it / one that measures nothing: "
    "hooks, statistics, events and tables, in the real loop; blocks of steps alternate; median of pairs. Then what "
    "hooks and statistics add to a bare ViT-S/16 step, batch 8, as a share of it; plain hooks: float32 scores, "
    "p log(p + eps), .item() in each layer; the floor: one float32 product and one exponential of each score.",
    "rate": "rate: matrix-product FLOPs of a step (counted) / its time / the best rate of BF16 matrix products "
    "measured in the same round; the floor is the time that those FLOPs would take at that rate.",
    "train": "train: time of a step of the real loop with one thing changed / the plain one (pre-norm, BF16 autocast), "
    "without the probe; and the parts of a plain step as shares of it.",
    "variants": "variants: time of a bare step with a preset / without a norm, alternating, median of pairs; FLOPs of "
    "forward and backward beyond those of a step without a norm (matrix products, and one for each element of every "
    "other operation); bytes that forward keeps for backward / without a norm. Presets that set the same keys are one.",
    "sweep": "sweep: seconds from the command to the start of the last five runs of 1,000, the others done; wall time "
    "of a stored sweep / (the sum of its runs' steps, probes and evaluations / workers), and what a run took beyond "
    "them.",
    "figures": "figures: from an empty process to the last file of every figure that fits a stored sweep of 5 "
    "variants, 4 rates and 50 seeds, 1,000 steps, 12 layers, 12 heads; and the most memory that it takes.",
    "report": "report: from an empty process to the file of a stored sweep of 100 runs, 1,000 steps, 12 layers and 12 "
    "heads, whose values are noise; the most memory that it takes; the size of the file.",
    "mirror": "mirror: time of a step (statistics included) of micro runs, one on each core, with a mirror to W&B "
    "beside them / without, whole sweeps in turns, median of pairs; online means a server on this machine that takes "
    "everything and keeps nothing, or fails as it says. Then seconds from the end of the last run to the "
    "end of the sweep's process.",
}


def measure(
    sections: Sequence[str], names: Sequence[str], effort: Effort, device: str, sweep: Path | None
) -> Iterator[Figure]:
    """Figures of the sections, each as soon as it is measured."""
    of_sizes = {"step": step_figures, "probe": probe_figures, "rate": rate_figures, "variants": variant_figures}
    for section in sections:
        if section in of_sizes:
            yield from of_sizes[section](names, effort, device)
        elif section == "train":
            yield from train_figures(effort, device)
        elif section == "figures":
            yield from figure_figures(effort.quick)
        elif section == "report":
            yield from report_figures(effort.quick)
        elif section == "mirror":
            yield from mirror_figures(effort.quick)
        else:
            yield from resume_figures(effort.quick)
            yield from sweep_figures(sweep) if sweep is not None else ()


def row(figure: Figure) -> tuple[str, ...]:
    """A figure as cells: what, value, quartiles, target, whether it is met."""
    unit = "" if figure.unit == "x" else f" {figure.unit}"
    spread = figure.detail.get("quartiles")
    sign = "≥" if figure.side == "above" else "≤"
    return (
        f"{figure.section} · {figure.name}",
        f"{figure.value:.3g}{unit}",
        f"{spread[0]:.3g} … {spread[1]:.3g}" if spread else "",
        "" if figure.target is None else f"{sign} {figure.target:g}{unit}",
        {None: "", True: "yes", False: "no"}[figure.met],
    )


def show(figures: Sequence[Figure], sections: Sequence[str], console: Console) -> None:
    table = Table(title="ratios, measured side by side", title_justify="left")
    for title in ("what", "median", "quartiles", "target", "met"):
        table.add_column(title, justify="left" if title == "what" else "right")
    for figure in figures:
        table.add_row(*row(figure))
    console.print(table)
    for section in sections:
        console.print(MEANING[section], style="dim")
    if "sweep" in sections and not any(f.name.startswith("wall") for f in figures):
        console.print("sweep wall time: not measured (no timing.json of a launch that trained every run)")


def report(figures: Sequence[Figure], **facts: Any) -> dict[str, Any]:
    """What the JSON file holds."""
    machine = {"cores": cores(), "machine": platform.machine(), "torch": torch.__version__, "timm": timm.__version__}
    return {**machine, **facts, "figures": [{**asdict(f), "met": f.met} for f in figures]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(MEANING)}; default: all")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=tuple(SIZES), help="default: all")
    parser.add_argument("--sweep", type=Path, help=f"a sweep's directory; default: {DEFAULT_SWEEP}, if it is there")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="few repeats: proves that it runs, measures nothing")
    args = parser.parse_args()
    unknown = [s for s in args.sections if s not in MEANING]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; accepted: {', '.join(MEANING)}")
    if args.sweep is not None and not args.sweep.is_dir():
        parser.error(f"--sweep {args.sweep}: no such directory")
    sections = args.sections or list(MEANING)
    sweep = args.sweep or (DEFAULT_SWEEP if DEFAULT_SWEEP.is_dir() else None)

    prepare_cpu()  # as runs do
    console, figures = Console(), []
    for figure in measure(sections, args.sizes, Effort(args.quick), args.device, sweep):
        figures.append(figure)
        console.print(*row(figure)[:2], style="dim", highlight=False)
    show(figures, sections, console)
    if args.json is not None:
        args.json.write_text(json.dumps(report(figures, device=args.device, quick=args.quick), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
