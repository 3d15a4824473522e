"""Speed, as ratios that are measured side by side in one process; absolute times depend on the machine's mood.

    python scripts/bench.py                                        # everything, about 6 minutes on two cores
    python scripts/bench.py step probe --sizes micro --quick       # a smoke test
    python scripts/bench.py sweep --sweep outputs/vit22b --json bench.json

Sections: ``step`` (against timm's own attention), ``probe`` (what telemetry costs), ``rate`` (against the
machine's matrix products), ``sweep`` (a stored sweep against its ideal wall time). Targets are printed next
to the figures and never change the exit code.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from qkexp.compose import compose_sweep
from qkexp.config import RunConfig
from qkexp.model.vit import build_vit
from qkexp.record.load import load_sweep, read_json
from qkexp.record.run import RunWriter
from qkexp.sweep.job import prepare_cpu
from qkexp.sweep.launch import cores
from qkexp.train import data as datasets
from qkexp.train.batches import training_batches
from qkexp.train.loop import train
from qkexp.train.precision import autocast, resolve

T = TypeVar("T")
CLASSES = 10
MATRICES = (1024, 2048, 4096)  # sides of the square matrices whose product is the machine's rate
DEFAULT_SWEEP = Path("outputs/vit22b")


@dataclass(frozen=True)
class Size:
    """A model size and how often it is measured."""

    overrides: tuple[str, ...]
    image_size: int
    batch: dict[str, int]  # device -> images a step
    threads: int | None  # None: all cores
    variants: tuple[str, ...]  # whose probe is measured
    pairs: int  # timings of each side
    inner: int  # steps a timing
    blocks: int  # runs of the training loop, each side
    block: int  # steps of such a run; as long as the loop collects before it writes, or nearly
    step_target: float
    probe_target: float


SIZES = {
    "micro": Size(
        ("model=vit_micro",),
        image_size=8,
        batch={"cpu": 64, "cuda": 64},
        threads=1,  # as the runs of a sweep
        variants=("none", "rmsnorm", "softcap"),
        pairs=15,
        inner=10,
        blocks=9,
        block=120,
        step_target=3.0,
        probe_target=1.20,
    ),
    "vit_s": Size(
        ("model=vit_small",),
        image_size=224,
        batch={"cpu": 16, "cuda": 128},
        threads=None,
        variants=("none",),
        pairs=7,
        inner=1,
        blocks=5,
        block=4,
        step_target=1.2,
        probe_target=1.12,
    ),
}


@dataclass(frozen=True)
class Effort:
    """How much to measure; ``--quick`` proves only that everything runs."""

    quick: bool = False

    def pairs(self, size: Size) -> int:
        return 2 if self.quick else size.pairs

    def variants(self, size: Size) -> tuple[str, ...]:
        return size.variants[:1] if self.quick else size.variants

    def blocks(self, size: Size) -> int:
        return 2 if self.quick else size.blocks

    def inner(self, size: Size) -> int:
        return 1 if self.quick else size.inner

    def block(self, size: Size) -> int:
        return min(size.block, 6) if self.quick else size.block


@dataclass(frozen=True)
class Figure:
    """One measured number. ``target`` is a bound on it from ``side`` (above or below); None: for information."""

    section: str
    name: str
    value: float
    unit: str = "x"
    target: float | None = None
    side: str = "above"
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.side == "above" else self.value <= self.target


MEANING = {
    "step": "step: time of timm's own model with its fused attention / time of ours; forward in BF16, loss, backward, "
    "Adam on both sides, alternating; median of pairs.",
    "probe": "probe: time of a training step that measures everything and stores it / one that measures nothing: "
    "hooks, statistics, events and tables, in the real loop; blocks of steps alternate; median of pairs.",
    "rate": "rate: matrix-product FLOPs of a step (counted) / its time / the best rate of BF16 matrix products "
    "measured in the same round; the floor is the time that those FLOPs would take at that rate.",
    "sweep": "sweep: wall time of a stored sweep / (the sum of its runs' steps, probes and evaluations / workers), and "
    "what a run took beyond them.",
}


# ---------------------------------------------------------------- timing


def synchronise(device: str) -> None:
    """Wait until the device has finished: a clock that is read earlier measures only the launch."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], repeat: int, device: str) -> float:
    """Time of one ``work()``, the mean of ``repeat`` in a row."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    synchronise(device)
    return (time.perf_counter() - start) / repeat


def side_by_side(a: Callable[[], T], b: Callable[[], T], pairs: int) -> tuple[list[T], list[T]]:
    """Measure A B A B …, after one of each that does not count: what A returned, and B."""
    a(), b()
    rounds = [(a(), b()) for _ in range(pairs)]
    return [first for first, _ in rounds], [second for _, second in rounds]


def ratio(section: str, name: str, over: list[float], under: list[float], **more: Any) -> Figure:
    """Median over pairs of ``over / under``, with its quartiles and both medians."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = quartiles(ratios)
    detail = {
        "quartiles": [low, high],
        "pairs": len(ratios),
        "seconds": [statistics.median(over), statistics.median(under)],
        **more.pop("detail", {}),
    }
    return Figure(section, name, middle, detail=detail, **more)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Compute on ``count`` CPU threads; None: on all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or cores())
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- what is timed


def configure(size: Size, device: str, *overrides: str) -> RunConfig:
    """A run of a size on synthetic images."""
    common = ("data=synthetic", f"data.image_size={size.image_size}", f"data.classes={CLASSES}", "tracker=none")
    batch = size.batch[device]
    own = (f"device={device}", f"train.batch_size={batch}", f"data.samples={batch}", "optim.lr=1e-4")
    cfg = compose_sweep([*size.overrides, *common, *own, *overrides], single=True).runs[0][1]
    resolve(cfg)
    return cfg


def one_batch(cfg: RunConfig) -> tuple[Tensor, Tensor]:
    """Images and labels of one step, on the configured device."""
    return next(training_batches(datasets.load(cfg.data), cfg, first_step=0))


def our_model(cfg: RunConfig) -> nn.Module:
    images = datasets.load(cfg.data).train.plain(np.arange(cfg.train.batch_size))
    model = build_vit(cfg, image_size=image_side(cfg), channels=3, classes=CLASSES, like=images)
    return model.to(cfg.device)


def both_models(cfg: RunConfig) -> tuple[nn.Module, nn.Module]:
    """timm's model with timm's attention, fused as by default, and ours."""
    m = cfg.model
    sizes: dict[str, Any] = {"embed_dim": m.width, "depth": m.depth, "num_heads": m.heads, "patch_size": m.patch}
    overrides = {key: value for key, value in sizes.items() if value is not None}
    theirs = timm.create_model(m.name, img_size=image_side(cfg), in_chans=3, num_classes=CLASSES, **overrides)
    return theirs.to(cfg.device), our_model(cfg)


def image_side(cfg: RunConfig) -> int:
    assert cfg.data.image_size is not None
    return cfg.data.image_size


def make_step(model: nn.Module, cfg: RunConfig) -> Callable[[], None]:
    """One training step: forward under autocast, loss, backward, optimiser."""
    images, labels = one_batch(cfg)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.optim.lr, fused=True)
    model.train()

    def step() -> None:
        with autocast(cfg.precision, cfg.device):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# ---------------------------------------------------------------- sections


def step_figures(names: Sequence[str], effort: Effort, device: str) -> Iterator[Figure]:
    """Our training step against timm's."""
    for name in names:
        size = SIZES[name]
        with threads(size.threads) as used:
            cfg = configure(size, device)
            a, b = (partial(seconds, make_step(m, cfg), effort.inner(size), device) for m in both_models(cfg))
            theirs, ours = side_by_side(a, b, effort.pairs(size))
        yield ratio(
            "step",
            f"{name}: step, timm / ours",
            theirs,
            ours,
            target=size.step_target if device == "cpu" else None,
            detail={"backend": cfg.attention.backend, "batch": cfg.train.batch_size, "threads": used},
        )


class Stopwatch(RunWriter):
    """The real recorder of a run, which notes when the first step had ended and when the last was stored.

    A step's own clock (``step_seconds``, ``probe_seconds``) leaves out events and tables, which telemetry
    costs too; the time between these two moments holds everything, but for the evaluation.
    """

    begin = end = math.nan

    def __init__(self, directory: Path, cfg: RunConfig):
        super().__init__(directory, cfg, {})
        self.rows: list[dict[str, float]] = []

    def row(self, row: dict[str, float]) -> None:
        if not self.rows:
            self.begin = time.perf_counter()
        self.rows.append(row)
        super().row(row)

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Keep no checkpoint; the loop comes here after it has stored the last rows."""
        self.end = time.perf_counter()

    def a_step(self) -> float:
        evaluation = sum(row.get("eval_seconds", 0.0) for row in self.rows)
        return (self.end - self.begin - evaluation) / (len(self.rows) - 1)

    def measuring(self) -> float:
        """Median of a step by its own clock: hooks and statistics are in it, events and tables are not."""
        return statistics.median(row["step_seconds"] + row["probe_seconds"] for row in self.rows[1:])


def probe_figures(names: Sequence[str], effort: Effort, device: str) -> Iterator[Figure]:
    """The training loop with the probe at every step on everything, against the loop without it.

    Short runs of the real loop alternate. Probing every second step of one run would interleave more
    finely, but would charge what the probe evicts from the caches to the step after it.
    """
    for name in names:
        size = SIZES[name]
        for variant in effort.variants(size):
            keys = (f"attention={variant}", f"train.steps={effort.block(size)}")
            with threads(size.threads) as used, tempfile.TemporaryDirectory() as folder:
                without, with_probe = (configure(size, device, *keys, f"probe.every={every}") for every in (0, 1))
                a, b = partial(run_loop, without, Path(folder)), partial(run_loop, with_probe, Path(folder))
                off, on = side_by_side(a, b, effort.blocks(size))
            measuring = [p.measuring() / q.measuring() for p, q in zip(on, off, strict=True)]
            yield ratio(
                "probe",
                f"{name} {variant}: probed / not",
                [run.a_step() for run in on],
                [run.a_step() for run in off],
                target=size.probe_target if device == "cpu" else None,
                side="below",
                detail={"without_events_and_tables": statistics.median(measuring), "threads": used},
            )


def run_loop(cfg: RunConfig, folder: Path) -> Stopwatch:
    """One run of the training loop, stored where the last one was."""
    watch = Stopwatch(folder / f"probe-{cfg.probe.every}", cfg)
    train(cfg, datasets.load(cfg.data), watch, lambda: None)
    return watch


def rate_figures(names: Sequence[str], effort: Effort, device: str) -> Iterator[Figure]:
    """FLOPs a second of a step, as a fraction of the machine's rate of BF16 matrix products."""
    for name in names:
        size = SIZES[name]
        with threads(size.threads):
            cfg = configure(size, device)
            step = make_step(our_model(cfg), cfg)
            with FlopCounterMode(display=False) as counter:
                step()
            flops = counter.get_total_flops()
            ours, machine = partial(seconds, step, effort.inner(size), device), partial(matrix_rate, effort, device)
            times, rates = side_by_side(ours, machine, effort.pairs(size))
        floor = [flops / rate for rate in rates]
        detail = {"flops": flops, "flops_per_second": statistics.median(rates)}
        if name == "micro":  # a micro step is not made of large matrix products: no target, but how far it is
            yield ratio("rate", f"{name}: step / its floor", times, floor, detail=detail)
        else:
            target = 0.7 if device == "cpu" else None
            yield ratio("rate", f"{name}: step's rate / matrix rate", floor, times, target=target, detail=detail)


def matrix_rate(effort: Effort, device: str) -> float:
    """Best FLOPs a second of a product of two square BF16 matrices, over ``MATRICES``."""
    rates = []
    for n in MATRICES[:1] if effort.quick else MATRICES:
        a, b, out = torch.randn(3, n, n, device=device).bfloat16()
        rates.append(2 * n**3 / seconds(partial(torch.mm, a, b, out=out), 2, device))
    return max(rates)


def sweep_figures(directory: Path) -> Iterator[Figure]:
    """A stored sweep: its wall time against its runs' own seconds, and what a run takes beyond them."""
    sweep = load_sweep(directory)
    own, overhead = {}, []
    for name, run in sweep.all.items():
        wall = (run.outcome or {}).get("wall_seconds")
        if wall is None:
            continue
        own[name] = float(run.scalars[["step_seconds", "probe_seconds", "eval_seconds"]].sum().sum())
        overhead.append(wall - own[name])
    if overhead:
        low, middle, high = quartiles(overhead)
        detail = {"quartiles": [low, high], "runs": len(overhead), "run_seconds": statistics.median(own.values())}
        yield Figure("sweep", "a run beyond its steps", middle, "s", 0.5, "below", detail)
    timing = read_json(directory / "timing.json")
    if timing and own and set(timing["trained"]) >= set(sweep.all) == set(own):
        ideal = sum(own.values()) / timing["workers"]
        detail = {"seconds": [timing["wall_seconds"], ideal], "workers": timing["workers"], "runs": len(own)}
        yield Figure("sweep", "wall time / ideal", timing["wall_seconds"] / ideal, "x", 1.2, "below", detail)


# ---------------------------------------------------------------- command line


def measure(
    sections: Sequence[str], names: Sequence[str], effort: Effort, device: str, sweep: Path | None
) -> Iterator[Figure]:
    """Figures of the sections, each as soon as it is measured."""
    of_sizes = {"step": step_figures, "probe": probe_figures, "rate": rate_figures}
    for section in sections:
        if section in of_sizes:
            yield from of_sizes[section](names, effort, device)
        elif sweep is not None:
            yield from sweep_figures(sweep)


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
