"""One frame of a model by name or path."""

from __future__ import annotations

import argparse
from pathlib import Path

from qkexp.config import UserError
from qkexp.verbs.terminal import DONE, out

HELP = "one frame of a timm model, or of a checkpoint of a run"
EXAMPLE = "qkexp probe vit_small_patch16_224"


def arguments(parser: argparse.ArgumentParser) -> None:
    from qkexp.probe.metrics import GROUPS

    parser.add_argument("model", metavar="MODEL", help="a timm model's name, a run directory or a checkpoint in one")
    parser.add_argument(
        "--weights",
        default="random",
        metavar="random|pretrained|FILE",
        help="of a timm model; pretrained: from timm's hub or your cache of it, random where they cannot be had",
    )
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="images; else those of the run's validation, or noise"
    )
    parser.add_argument("--batch", type=int, default=8, help="how many images (8)")
    untrained = [group for group in GROUPS if group not in ("gradients", "update", "adam")]
    parser.add_argument("--groups", nargs="+", default=(), choices=untrained, help="further metrics (docs/metrics.md)")
    parser.add_argument("--output", type=Path, default=Path("outputs/probe"), metavar="DIR", help="(outputs/probe)")


def run(options: argparse.Namespace) -> int:
    from qkexp.analysis import snapshot
    from qkexp.probe.check import CoverageError

    if options.batch < 1:
        raise UserError(f"--batch={options.batch}: at least 1")
    with out.status(f"probing {options.model}"):
        subject = snapshot.subject(options.model, options.weights, options.images, options.batch)
        try:
            frame, coverage = snapshot.take(subject, options.groups)
        except CoverageError as error:
            raise UserError(f"{options.model}: {error}") from None
        picture = snapshot.files(frame, subject, options.output / subject.name)
    out.print(snapshot.table(frame))
    for text in (f"{subject.name}: {subject.weights}; {subject.pictures}; {subject.precision}", str(coverage)):
        out.print(text, soft_wrap=True, markup=False)
    out.print(f"all heads and metrics: {picture.with_suffix('.csv')}\nmap: {picture}", soft_wrap=True)
    return DONE
