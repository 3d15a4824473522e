"""The report of a large sweep: 100 stored runs of 1,000 steps, 12 layers and 12 heads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.stored import in_a_process, store
from benchmarks.timing import Figure

RUNS = ["attention=none,layernorm,rmsnorm,l2,softcap", "optim.lr=1e-2,1e-1"]

WRITE = """
import json, resource, sys, time
start = time.monotonic()
from pathlib import Path
from qkexp.analysis.report import write_report
path = write_report(Path(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.monotonic() - start, "gb": peak / 1e6, "mb": path.stat().st_size / 1e6}))
"""


def report_figures(quick: bool = False) -> Iterator[Figure]:
    """Seconds and memory from the command's start to the file, and its size."""
    seeds, steps, depth, heads = (1, 30, 2, 2) if quick else (10, 1000, 12, 12)
    with tempfile.TemporaryDirectory(prefix="qkexp-bench-") as folder:
        plan = store(Path(folder), [*RUNS, f"seed=range(0,{seeds})"], steps, depth, heads)
        found = in_a_process(WRITE, plan.directory)
    detail = {"runs": len(plan.runs), "steps": steps, "layers": depth, "heads": heads}
    name = f"of {len(plan.runs)} runs"
    yield Figure("report", f"{name}: load and write", found["seconds"], "s", 20.0, "below", detail)
    yield Figure("report", f"{name}: memory", found["gb"], "GB", 2.0, "below", detail)
    yield Figure("report", f"{name}: file", found["mb"], "MB", 10.0, "below", detail)
