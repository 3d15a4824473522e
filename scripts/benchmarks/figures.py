"""Figures of a large sweep: 1,000 stored runs of 1,000 steps, 12 layers and 12 heads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.stored import in_a_process, store
from benchmarks.timing import Figure

RUNS = ["attention=none,layernorm,rmsnorm,l2,softcap", "optim.lr=3e-3,1e-2,3e-2,1e-1"]

DRAW = """
import json, resource, sys, time
start = time.monotonic()
from pathlib import Path
from qkexp.analysis.figures import draw
drawn = draw(Path(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.monotonic() - start, "gb": peak / 1e6, "figures": [p.stem for p in drawn]}))
"""


def figure_figures(quick: bool = False) -> Iterator[Figure]:
    """Seconds and memory from the command's start to the last file."""
    seeds, steps, depth, heads = (2, 30, 2, 2) if quick else (50, 1000, 12, 12)
    with tempfile.TemporaryDirectory(prefix="qkexp-bench-") as folder:
        plan = store(Path(folder), [*RUNS, f"seed=range(0,{seeds})"], steps, depth, heads)
        found = in_a_process(DRAW, plan.directory)
    detail = {"runs": len(plan.runs), "steps": steps, "layers": depth, "heads": heads, "figures": found["figures"]}
    name = f"{', '.join(found['figures'])} of {len(plan.runs)} runs"
    yield Figure("figures", f"{name}: load and draw", found["seconds"], "s", 60.0, "below", detail)
    yield Figure("figures", f"{name}: memory", found["gb"], "GB", 4.0, "below", detail)
