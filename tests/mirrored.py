"""Made-up runs, and what an offline W&B run holds of them."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from qkexp.compose import compose_sweep
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES
from qkexp.record.mirror import maps
from qkexp.record.mirror.run import Copy
from qkexp.record.run import RunWriter

COMPLETED = {"status": "completed", "reason": "final loss 0.5", "step": 6, "steps": 6,
             "final": {"loss": 0.5, "val_loss": None}, "best": {"val_loss": 0.4}}  # fmt: skip


def writer(directory: Path, *overrides: str, keep: int = 0) -> RunWriter:
    directory.parent.mkdir(parents=True, exist_ok=True)
    return RunWriter(directory, compose_sweep(overrides, single=True).runs[0][1], {}, keep)


def frame(step: int) -> Frame:
    """Two layers of two heads; every number of it is different, but for what is 0 or fixed in a real run."""
    values = torch.arange(len(NAMES) * 4, dtype=torch.float32).reshape(len(NAMES), 2, 2) + 1000 * step + 0.5
    for name in ("masked_rows", "nonfinite"):
        values[NAMES.index(name)] = 0.0
    values[NAMES.index("score_scale")] = 0.25
    return Frame(step, "train", ("blocks.0.attn", "blocks.1.attn"), (Group((0, 1), values),))


def fill(record: RunWriter, steps: range, probe: bool = True, shift: float = 0.0) -> None:
    for step in steps:
        took = time.perf_counter()  # never the same twice, as in a real run
        record.row({"step": step, "loss": 1 / (step + 1) + shift, "lr": 0.1, "step_seconds": took})
        if probe:
            record.frame(frame(step))


def finished(directory: Path, *overrides: str, **outcome: Any) -> Path:
    record = writer(directory, *overrides)
    fill(record, range(6))
    record.finish(COMPLETED | outcome)
    return directory


def copy(directory: Path) -> Copy:
    return Copy(directory, "project", "offline", "group")


def identifier(directory: Path) -> str:
    return json.loads((directory / "mirror.json").read_text())["id"]


def records(data: bytes) -> Iterator[Any]:
    """Records of a ``.wandb`` file: a LevelDB log of protobuf messages, after seven bytes of header."""
    from wandb.proto import wandb_internal_pb2 as pb

    assert data[:4] == b":W&B"
    at, message = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a record's header does not cross the blocks
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or last
            record = pb.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def whole(path: Path, patience: float = 20.0) -> list[Any]:
    """All records of a run that was closed: wandb's service may still be writing the last of them."""
    limit = time.monotonic() + patience
    while True:
        with contextlib.suppress(DecodeError):
            found = list(records(path.read_bytes()))
            if any(record.WhichOneof("record_type") == "exit" for record in found):
                return found
        assert time.monotonic() < limit, f"{path} has no end"
        time.sleep(0.05)


class Sent:
    """What an offline ``.wandb`` file holds."""

    def __init__(self, directory: Path, run_id: str | None = None):
        (path,) = directory.glob(f"wandb/*/run-{run_id or identifier(directory)}.wandb")
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.media: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.artifacts: dict[str, list[str]] = {}
        for record in whole(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row: dict[str, Any] = {}
                for item in record.history.item:
                    first, *rest = list(item.nested_key) or [item.key]
                    value = json.loads(item.value_json)
                    row[first] = value if not rest else row.get(first, {}) | {".".join(rest): value}
                step = record.history.step.num
                kept = {k: v for k, v in row.items() if not k.startswith("_")}
                self.media.append((step, {k: v for k, v in kept.items() if isinstance(v, dict)}))
                self.rows.append((step, {k: v for k, v in kept.items() if not isinstance(v, dict)}))
            elif kind == "summary":
                for item in record.summary.update:
                    self.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
                for item in record.summary.remove:
                    self.summary.pop(item.key or ".".join(item.nested_key), None)
            elif kind == "run":
                self.run = record.run
                self.config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
            elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
                artifact = record.request.log_artifact.artifact
                self.artifacts[artifact.type] = [entry.path for entry in artifact.manifest.contents]
            elif kind == "artifact":
                self.artifacts[record.artifact.type] = [entry.path for entry in record.artifact.manifest.contents]
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]

    def table(self, directory: Path, key: str) -> list[list[Any]]:
        """The rows of a table that a row holds."""
        (found,) = [media[key] for _, media in self.media if key in media]
        (path,) = directory.glob(f"wandb/*/files/{found['path']}")
        return json.loads(path.read_text())["data"]


def swept(tmp_path: Path) -> Path:
    """A sweep of two runs, one of which diverged, with a claim and a figure."""
    directory = tmp_path / "sweep"
    for seed, outcome in ((1, {}), (2, {"status": "diverged", "final": {"loss": None}})):
        finished(directory / f"run{seed}", f"seed={seed}", **outcome)
    runs = [{"name": f"run{seed}"} for seed in (1, 2)]
    (directory / "plan.json").write_text(json.dumps({"runs": runs}))
    claims = [{"claim": "falls", "value": "inf", "bound": "< 1", "verdict": "fail", "detail": "run2"},
              {"claim": "holds", "value": 0.5, "bound": "< 1", "verdict": "pass"}]  # fmt: skip
    (directory / "claims.json").write_text(json.dumps({"claims": claims}))
    (directory / "figures").mkdir()
    maps.picture(np.zeros((1, 1)), "entropy_frac").save(directory / "figures" / "curves.png")
    return directory
