"""The labelled test bed: its sets, its labels and its arithmetic; not its runs."""

from __future__ import annotations

import generated
import pandas as pd
import pytest
from testbed import DOCUMENT, TABLES, false_alarms, labels, overrides, recall, wilson
from testbed_recipes import DEVELOP, KINDS, MEASURE, SETS

from qkexp.analysis.diagnose import ATTENTION, HEALTHY, VERDICTS
from qkexp.compose import compose_sweep
from qkexp.config import identity


@pytest.mark.parametrize("name", list(SETS))
def test_every_run_of_a_set_has_one_label_and_the_sets_share_neither_runs_nor_seeds(name: str) -> None:
    known = labels(SETS[name], name, "outputs")
    runs = [cfg for _, cfg in compose_sweep(overrides(SETS[name], name, "outputs")).runs]
    assert {identity(cfg) for cfg in runs} == set(known)
    assert len(runs) == len(known), "no run stands in two recipes"
    low, high, least = {
        "develop": (600, 629, 60),
        "first": (640, 699, 150),
        "second": (720, 799, 150),
        "measure": (820, 905, 150),
    }[name]
    assert all(low <= cfg.seed <= high for cfg in runs)
    assert len(runs) >= least
    assert {recipe.kind for recipe in SETS[name]} == set(KINDS)
    assert all(kind.cause in VERDICTS for kind in KINDS.values())


def test_the_measuring_set_has_a_hundred_healthy_runs_and_other_data() -> None:
    known = labels(MEASURE, "measure", "outputs")
    healthy = [r for r in known.values() if KINDS[r.kind].cause == HEALTHY]
    assert len(healthy) >= 90, "and the arms beside others"
    assert {r.runs.get("data", "digits") for r in MEASURE} == {"digits", "fashion_mnist", "synthetic"}
    assert {r.runs.get("data", "digits") for r in DEVELOP} == {"digits"}


def test_wilson_s_interval_is_that_of_the_score_test() -> None:
    for right, count in ((9, 10), (0, 20), (50, 50), (113, 120)):
        low, high = wilson(right, count)
        for edge in (low, high):
            if 1e-9 < edge < 1 - 1e-9:  # where the share is 1.96 standard errors of the edge away
                z = abs(right / count - edge) / (edge * (1 - edge) / count) ** 0.5
                assert z == pytest.approx(1.959964, rel=1e-6)
    assert wilson(0, 20)[0] == 0.0
    assert wilson(50, 50)[1] == pytest.approx(1.0)
    assert wilson(0, 0) == (0.0, 1.0)


def test_recall_leaves_out_what_did_not_bite_and_counts_alarms_over_healthy_runs() -> None:
    rows = [("forced logit growth", ATTENTION, True, ATTENTION)] * 3
    rows += [
        ("forced logit growth", ATTENTION, True, "inconclusive"),
        ("forced logit growth", ATTENTION, False, HEALTHY),
    ]
    rows += [("plain healthy", HEALTHY, True, HEALTHY)] * 9 + [("plain healthy", HEALTHY, True, "harmless_collapse")]
    table = pd.DataFrame(rows, columns=["kind", "called for", "bit", "verdict"]).assign(alone=HEALTHY)
    forced = next(row for row in recall(table) if row[0] == "forced logit growth")
    assert forced[2:4] == ["4", "1"]
    assert forced[4].startswith("0.75 (0.30 … 0.95)")
    assert forced[5].startswith("0.00")
    assert forced[6] == "1 `inconclusive`"
    assert false_alarms(table).startswith("Of 10 healthy runs 1 were called collapsed: 10.0%")


def test_the_tables_of_the_document_are_those_of_the_rules() -> None:
    text = DOCUMENT.read_text()
    assert generated.regenerated(text, TABLES) == text, "run python scripts/testbed.py tables"
