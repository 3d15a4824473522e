"""docs/figures.md: every experiment with its picture from a real run, its command, its time, and what the paper shows.

    python scripts/gallery.py                       # pictures and times of sweeps under outputs/, then the page
    python scripts/gallery.py --outputs DIR         # of sweeps elsewhere
    python scripts/gallery.py --check               # change nothing; exit 1 where the page is not up to date

What a sweep measured stays in docs/img/gallery.json, so the page can be made again without the sweep. An experiment
that was never run says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "configs" / "experiment"
DOCS = ROOT / "docs"
FACTS = DOCS / "img" / "gallery.json"
PAGE = DOCS / "figures.md"
REQUIRED = ("command", "hardware", "time", "expect")  # what each experiment's file begins with
HEADER = (*REQUIRED, "paper")
COLOURS = 160  # of a stored picture: a third of the bytes, and nothing that is seen

INTRODUCTION = """# Figures

<!-- made by `make gallery` from configs/experiment and finished sweeps; edit those -->

Each experiment is one file in [configs/experiment](../configs/experiment): a command trains its runs, checks its claims
and draws its figures into `outputs/NAME/figures` (PDF, PNG, and a CSV of exactly what is plotted). Models, data and
rates are a toy's: the pictures show mechanisms, not the numbers of the papers. "Not shown" are claims that the file
declares beforehand as not borne out in every run at this size; their measured values are printed. How to read the
curves: [reading.md](reading.md).
"""


@dataclass(frozen=True)
class Experiment:
    """What an experiment's file says: its first words, the keys of its header, and its figures."""

    name: str
    title: str
    header: Mapping[str, str]
    figures: tuple[str, ...]
    claims: int

    @classmethod
    def of(cls, path: Path) -> Experiment:
        """Read a file of configs/experiment.

        Raises:
            ValueError: its header lacks one of :data:`REQUIRED`.
        """
        text = path.read_text()
        comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()[1:])
        header: dict[str, str] = {}
        title, key = [], None
        for line in (line[1:].rstrip() for line in comment):
            found = re.match(r"   (\w+)\s{2,}(\S.*)", line)
            if found:
                key = found.group(1)
                header[key] = found.group(2)
            elif not line.strip():
                key = None
            elif key:
                header[key] += " " + line.strip()
            elif not header:
                title.append(line.strip())
        missing = [key for key in REQUIRED if key not in header]
        if missing or not title:
            raise ValueError(f"{path.name}: the header has no {', '.join(missing) or 'first sentence'}")
        content = yaml.safe_load(text) or {}
        claims = (content.get("expect") or {}).get("claims", [])
        return cls(path.stem, " ".join(title), header, tuple(content.get("figures") or ()), len(claims))


def experiments() -> list[Experiment]:
    """Every experiment, by name; the default one first."""
    found = [Experiment.of(path) for path in sorted(EXPERIMENTS.glob("*.yaml"))]
    return sorted(found, key=lambda e: (e.name != "vit22b", e.name))


def measured(directory: Path, figures: tuple[str, ...]) -> dict[str, Any] | None:
    """What a finished sweep tells; None where it is not finished, or was not drawn and verified."""
    plan = _json(directory / "plan.json")
    pictures = [directory / "figures" / f"{name}.png" for name in figures]
    if plan is None or not all(path.is_file() for path in pictures):
        return None
    outcomes = [_json(directory / run["name"] / "outcome.json") for run in plan["runs"]]
    if not all(o is not None and o["status"] in ("completed", "diverged") for o in outcomes):
        return None
    timing = _json(directory / "timing.json") or {}
    names = {run["name"] for run in plan["runs"]}
    whole = bool(names) and set(timing.get("trained", ())) == names  # else it was trained in parts
    claims = Counter(claim["verdict"] for claim in (_json(directory / "claims.json") or {"claims": []})["claims"])
    return {
        "runs": len(names),
        "statuses": dict(sorted(Counter(o["status"] for o in outcomes if o).items())),
        "seconds": round(timing["wall_seconds"]) if whole else None,
        "workers": timing.get("workers") if whole else None,
        "run_seconds": round(sum(o.get("wall_seconds") or 0.0 for o in outcomes if o)),
        "seeds": sorted({run["config"]["seed"] for run in plan["runs"]}),
        "written": plan["written"][:10],
        "claims": dict(sorted(claims.items())),
    }


def collect(outputs: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Add what sweeps under ``outputs`` tell, and copy their pictures."""
    for experiment in experiments():
        directory = outputs / experiment.name
        found = measured(directory, experiment.figures)
        if found is None:
            continue
        facts[experiment.name] = found
        for name in experiment.figures:
            _store(directory / "figures" / f"{name}.png", picture(experiment, name))
    return facts


def picture(experiment: Experiment, figure: str) -> Path:
    """Where a figure's picture stands; the experiment's own carries its name once."""
    name = figure if figure.startswith(experiment.name) else f"{experiment.name}_{figure}"
    return DOCS / "img" / f"{name}.png"


def page(facts: Mapping[str, Any]) -> str:
    """docs/figures.md."""
    found = experiments()
    lines = [INTRODUCTION, "| experiment | shows | command | claims |", "|---|---|---|---|"]
    for e in found:
        claims = _claims(facts.get(e.name), e)
        lines.append(f"| [`{e.name}`](#{e.name}) | {_cell(e.title)} | {_command(e)} | {claims} |")
    for e in found:
        lines += ["", f"## {e.name}", "", e.title, ""]
        lines += [f"- **{key.capitalize()}**: {_text(key, e)}" for key in HEADER if key in e.header]
        lines += [f"- **Measured**: {_measured(facts.get(e.name), e)}"]
        for name in e.figures:
            if picture(e, name).is_file():
                lines += ["", f"![{e.name}: {name}](img/{picture(e, name).name})"]
    return "\n".join(lines) + "\n"


def _text(key: str, e: Experiment) -> str:
    return _command(e) if key == "command" else e.header[key]


def _command(e: Experiment) -> str:
    command, _, rest = e.header["command"].partition("  ")
    return f"`{command.strip()}`" + (f" {rest.strip()}" if rest.strip() else "")


def _claims(facts: Mapping[str, Any] | None, e: Experiment) -> str:
    if facts is None:
        return "not run" if e.claims else "not run (it has none)"
    return ", ".join(f"{count} {verdict}" for verdict, count in facts["claims"].items()) or "none"


def _measured(facts: Mapping[str, Any] | None, e: Experiment) -> str:
    if facts is None:
        return "not run yet."
    if not facts["runs"]:
        return f"{facts['written']}, no runs; claims: {_claims(facts, e)}."
    statuses = ", ".join(f"{count} {status}" for status, count in facts["statuses"].items())
    text = f"{facts['written']}, {facts['runs']} runs ({statuses}) on seeds {_ranges(facts['seeds'])}"
    if facts["seconds"] is not None:
        text += f", {facts['seconds']} s with {facts['workers']} workers"
    else:
        text += f", trained in parts: {facts['run_seconds']} s of runs"
    return f"{text}; claims: {_claims(facts, e)}."


def _ranges(seeds: list[int]) -> str:
    """``200–202, 210``"""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _store(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        small = image.convert("RGB").quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        small.save(target, optimize=True)


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs", help="folder of sweeps; default: outputs/")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the page differs")
    args = parser.parse_args()
    facts = _json(FACTS) or {}
    if args.check:
        same = PAGE.is_file() and PAGE.read_text() == page(facts)
        print("figures.md is up to date" if same else "figures.md differs: run make gallery")
        return int(not same)
    facts = collect(args.outputs, facts)
    FACTS.write_text(json.dumps(dict(sorted(facts.items())), indent=1) + "\n")
    PAGE.write_text(page(facts))
    not_run = [e.name for e in experiments() if e.name not in facts]
    print(f"{PAGE}: {len(facts)} experiments" + (f"; not run: {', '.join(not_run)}" if not_run else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
