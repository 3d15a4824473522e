"""Runs of known cause, and how often `qkexp diagnose` names it: the labelled test bed of docs/diagnosis.md.

    python scripts/testbed.py develop            # the runs that the rules were made on (digits, seeds from 600)
    python scripts/testbed.py first              # others, for one measurement once the rules stood (seeds from 640)
    python scripts/testbed.py second             # and others again, once one rule had been mended (seeds from 720)
    python scripts/testbed.py measure            # and once another one had (seeds from 820)
    python scripts/testbed.py measure --write    # and its table of docs/diagnosis.md
    python scripts/testbed.py tables             # the other tables; --check: exit 1 where they differ

The label comes from how a run was made (scripts/testbed_recipes.py). Where an intervention may fail to bite, a
criterion that does not look at the verdict decides whether it did; a run in which it did not is left out. Stopped
anywhere, the same command goes on (it is an ordinary sweep).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import generated
import pandas as pd
from testbed_recipes import KINDS, SETS, Recipe, partner

from qkexp.analysis.diagnose import ATTENTION, HARMLESS, HEALTHY, diagnose, links_table, rules_table
from qkexp.cli import main as qkexp
from qkexp.compose import compose_sweep
from qkexp.config import identity
from qkexp.record.load import Sweep, load_sweep

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "diagnosis.md"
PLAIN = "plain healthy"
STEPS = {"develop": 200, "first": 150, "second": 150, "measure": 150}
Z = 1.959964  # two-sided 95 %


def overrides(recipes: Sequence[Recipe], name: str, output: str) -> list[str]:
    """The sweep of some recipes, as `qkexp sweep` takes it."""
    entries = [", ".join(f"{key}: {_written(value)}" for key, value in recipe.runs.items()) for recipe in recipes]
    texts = ",".join(f"{{{entry}}}" for entry in entries)
    common = [
        "model=vit_micro",
        "optim.warmup=20",
        f"train.steps={STEPS[name]}",
        "tracker=none",
        "hydra.launcher.workers=2",
    ]
    keys = {key for recipe in recipes for key in recipe.runs}
    # what stands on the command line goes over an entry's own value
    axes = [o for o in common if o.split("=")[0] not in keys]
    defaults = {o.split("=")[0]: o.split("=")[1] for o in common if o.split("=")[0] in keys}
    if defaults:
        filled = [{**{k: v for k, v in defaults.items() if k not in r.runs}, **r.runs} for r in recipes]
        texts = ",".join("{" + ", ".join(f"{k}: {_written(v)}" for k, v in entry.items()) + "}" for entry in filled)
    return [*axes, f"sweep_name=testbed_{name}", f"output_dir={output}", f"runs=[{texts}]"]


def _written(value: object) -> str:
    text = str(value)
    return text if text.startswith("[") or not isinstance(value, str) else f'"{text}"'


def labels(recipes: Sequence[Recipe], name: str, output: str) -> dict[str, Recipe]:
    """Identity of each run -> its recipe."""
    composed = ((recipe, compose_sweep(overrides([recipe], name, output))) for recipe in recipes)
    return {identity(cfg): recipe for recipe, sweep in composed for _, cfg in sweep.runs}


def examine(sweep: Sweep, known: dict[str, Recipe]) -> Iterator[dict[str, object]]:
    """A row a run: kind, the verdict that its making calls for, whether that bit, and the verdicts."""
    for run in sweep.all.values():
        recipe = known.get(identity(run.typed))
        if recipe is None or run.status not in ("completed", "diverged"):
            continue
        kind = recipe.kind if recipe.intervened(run) else PLAIN
        yield {
            "run": run.name,
            "kind": kind,
            "data": run.typed.data.name,
            "called for": KINDS[kind].cause,
            "bit": KINDS[kind].bites(run, partner(run, sweep, recipe)),
            "verdict": diagnose(run, sweep).verdict,
            "alone": diagnose(run).verdict,
        }


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927); (0, 1) of nothing."""
    if not count:
        return 0.0, 1.0
    share, z2 = right / count, Z * Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def recall(table: pd.DataFrame) -> list[list[str]]:
    """A row a kind: runs, left out, recall in the sweep and alone, and what the others were called."""
    rows = []
    for kind, spec in KINDS.items():
        made = table[table.kind == kind]
        used = made[made.bit]
        cells = [kind, f"`{spec.cause}`", str(len(used)), str(len(made) - len(used))]
        for column in ("verdict", "alone"):
            right = int((used[column] == spec.cause).sum())
            low, high = wilson(right, len(used))
            cells.append(f"{right / len(used):.2f} ({low:.2f} … {high:.2f})" if len(used) else "-")
        wrong = used[used.verdict != spec.cause].verdict.value_counts()
        rows.append([*cells, ", ".join(f"{n} `{v}`" for v, n in wrong.items()) or "-"])
    return rows


def false_alarms(table: pd.DataFrame) -> str:
    """Healthy runs that were called collapsed, harmlessly or not."""
    used = table[table.bit & (table["called for"] == HEALTHY)]
    called = int(used.verdict.isin([ATTENTION, HARMLESS]).sum())
    low, high = wilson(called, len(used))
    share = f"{called / len(used):.1%} (95 %: {low:.1%} … {high:.1%})" if len(used) else "-"
    return f"Of {len(used)} healthy runs {called} were called collapsed: {share}."


TITLES = ("made as", "verdict that names it", "runs", "left out", "recall (95 %)", "of a run alone", "the others")


def kinds_table() -> str:
    rows = [(k, x.done, f"`{x.cause}`", " ".join(x.criterion.split())) for k, x in KINDS.items()]
    return generated.markdown(("made as", "what was done", "verdict that names it", "it had an effect where"), rows)


TABLES = {
    "links": lambda: generated.markdown(("link", "column", "score", "mild, clear, severe"), links_table()),
    "rules": lambda: generated.markdown(("when", "verdict"), [(w, f"`{v}`") for w, v in rules_table()]),
    "kinds": kinds_table,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*SETS, "tables"))
    parser.add_argument("--output", default="outputs", help="folder of the sweep (outputs)")
    parser.add_argument("--write", action="store_true", help="write the set's table of docs/diagnosis.md")
    parser.add_argument("--no-train", action="store_true", help="examine what is there")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the tables differ")
    options = parser.parse_args()
    if options.what == "tables":
        return _tables(options.check)
    if options.write and f"<!-- generated: {options.what} -->" not in DOCUMENT.read_text():
        parser.error(
            f"{DOCUMENT.name} holds what {options.what} gave with the rules of its time: --write would change it"
        )
    recipes = SETS[options.what]
    if not options.no_train:
        code = qkexp(["sweep", *overrides(recipes, options.what, options.output)])
        if code:
            return code
    directory = Path(options.output) / f"testbed_{options.what}"
    table = pd.DataFrame(examine(load_sweep(directory), labels(recipes, options.what, options.output)))
    table.to_csv(directory / "testbed.csv", index=False)
    text = generated.markdown(TITLES, recall(table)) + "\n\n" + false_alarms(table)
    print(text)
    if options.write:
        DOCUMENT.write_text(generated.regenerated(DOCUMENT.read_text(), {options.what: lambda: text}))
    return 0


def _tables(check: bool) -> int:
    old = DOCUMENT.read_text()
    new = generated.regenerated(old, TABLES)
    if not check:
        DOCUMENT.write_text(new)
    elif new != old:
        print(f"{DOCUMENT.name} differs: run python scripts/testbed.py tables")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
