"""The sections that compare steps, probes, rates and sweeps."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.probing import cost_figures
from benchmarks.timing import Figure, quartiles, ratio, seconds, side_by_side, threads
from benchmarks.workloads import SIZES, Effort, both_models, configure, make_step, our_model, run_loop
from qkexp.record.load import load_sweep, read_json

MATRICES = (1024, 2048, 4096)  # sides of the square matrices whose product is the machine's rate


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
                a, b = (partial(run_loop, cfg, Path(folder) / str(cfg.probe.every)) for cfg in (without, with_probe))
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
    if "vit_s" in names and device == "cpu":
        yield from cost_figures(effort)


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
        yield Figure("sweep", "wall time / ideal", timing["wall_seconds"] / ideal, "x", 1.15, "below", detail)
