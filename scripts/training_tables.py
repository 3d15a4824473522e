"""The generated tables of docs/training.md: the dtype of every part, and the peak of every schedule.

    python scripts/training_tables.py            # rewrites the tables in place
    python scripts/training_tables.py --check    # exit 1 where they differ

The dtypes are those of the CPU, measured by the dry pass that every run makes (``provenance.json`` has a run's own).
"""

from __future__ import annotations

import copy
from pathlib import Path

import generated
import numpy as np

from qkexp.compose import compose_sweep, options
from qkexp.config import OptimConfig, RunConfig
from qkexp.model.vit import build_vit
from qkexp.train import data as datasets
from qkexp.train.dtypes import measure
from qkexp.train.optim import Updater
from qkexp.train.precision import WEIGHTS, resolve
from qkexp.train.schedule import SCHEDULES, learning_rate

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "training.md"
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimiser state",
    "linear": "products",
    "block_norm": "block norms",
    "qk_norm": "QK norm",
    "scores": "scores",
    "softmax": "softmax",
    "attention_weights": "attention weights",
    "output": "output logits",
}
EXTRA = {"bf16, `attention.score_dtype=fp32`": ("precision=bf16", "attention.score_dtype=fp32")}
STEPS, WARMUP, PEAK = 1000, 100, 3e-3


def dtype_table() -> str:
    """A row a precision, a column a part."""
    rows = {name: (f"precision={name}",) for name in options("precision")} | EXTRA
    lines = ["| precision | " + " | ".join(PARTS.values()) + " |", "|---" * (len(PARTS) + 1) + "|"]
    for name, overrides in rows.items():
        found = dtypes(*overrides)
        lines.append(f"| {name} | " + " | ".join(found[part] for part in PARTS) + " |")
    return "\n".join(lines)


def dtypes(*overrides: str) -> dict[str, str]:
    """Measured on the micro ViT with RMSNorm, after one step of the optimiser."""
    cfg: RunConfig = compose_sweep(["attention=rmsnorm", "device=cpu", *overrides], single=True).runs[0][1]
    resolve(cfg)
    data = datasets.load(cfg.data)
    images = data.train.plain(np.arange(cfg.train.batch_size))
    model = build_vit(cfg, image_size=data.image_size, channels=data.channels, classes=data.classes)
    model = model.to(WEIGHTS[cfg.precision.weights])
    found = measure(model, images.to(WEIGHTS[cfg.precision.weights]), cfg)
    updater = Updater(model, cfg.optim, steps=1)
    updater.step(0)
    return found | {"optimizer_state": updater.state_dtypes()}


def schedule_table() -> str:
    """A row a schedule: its largest rate, where, and its last."""
    lines = [
        f"| schedule | largest rate (asked for: {PEAK:g}) | at step | rate half-way | last rate |",
        "|---|---|---|---|---|",
    ]
    for name in SCHEDULES:
        for cooldown in (0, STEPS // 5) if name == "rsqrt" else (0,):
            cfg = OptimConfig(lr=PEAK, warmup=WARMUP, schedule=name, cooldown=cooldown)
            rates = [learning_rate(step, STEPS, copy.copy(cfg)) for step in range(STEPS)]
            label = f"{name}, `optim.cooldown={cooldown}`" if cooldown else name
            cells = f"{max(rates)!r} | {rates.index(max(rates))} | {rates[STEPS // 2]:.3g} | {rates[-1]:.3g}"
            lines.append(f"| {label} | {cells} |")
    return "\n".join(lines)


TABLES = {"dtypes": dtype_table, "schedules": schedule_table}


def regenerated(text: str) -> str:
    """The document with its tables made anew."""
    return generated.regenerated(text, TABLES)


if __name__ == "__main__":
    raise SystemExit(generated.main("training_tables.py", __doc__, DOCUMENT, TABLES))
