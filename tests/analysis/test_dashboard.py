"""The W&B workspace and report: what they show is what the mirror sends, and a second time replaces the first."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qkexp import cli
from qkexp.analysis import dashboard
from qkexp.analysis.dashboard import SECTIONS, Chart
from qkexp.analysis.figures.style import LOOKS
from qkexp.compose import compose_sweep
from qkexp.probe.metrics import NAMES
from qkexp.record.mirror import facts, maps
from qkexp.record.mirror.rows import WORST
from qkexp.record.run import MEASURED

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # wandb-workspaces' own
pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed (pip install 'qkexp[dashboard]')")
CHARTS = [chart for charts in SECTIONS.values() for chart in charts]
KEYS = {
    *MEASURED,
    "nonfinite",
    *(f"attn/worst/{m}" for m in WORST),
    *(f"attn/L{n:02d}/{m}" for n in (0, 11) for m in NAMES),
}


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return dashboard.specification("team", "project")


def panels(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """title -> line chart of the view."""
    sections = spec["view"]["spec"]["section"]["panelBankConfig"]["sections"]
    found = [p for section in sections for p in section["panels"] if p["viewType"] == "Run History Line Plot"]
    return {panel["config"]["chartTitle"]: panel["config"] for panel in found}


@pytest.mark.parametrize("chart", CHARTS, ids=lambda c: c.title)
def test_a_chart_shows_keys_that_the_mirror_sends(chart: Chart) -> None:
    if not chart.pattern:
        assert chart.key in KEYS
        return
    shown = {key for key in KEYS if re.fullmatch(chart.key, key)}
    metric = chart.key.rpartition("/")[2]
    assert shown == {f"attn/L00/{metric}", f"attn/L11/{metric}"}, "every layer, and no other metric"


def test_titles_are_unique(spec: dict[str, Any]) -> None:
    assert len(panels(spec)) == len(CHARTS)


def test_the_view_has_what_an_entropy_collapse_needs(spec: dict[str, Any]) -> None:
    shown = {key for config in panels(spec).values() for key in (*config.get("metrics", []), config.get("metricRegex"))}
    layers = {f"attn/L[0-9]+/{m}" for m in ("max_abs_logit", "entropy_frac", "q_in_norm_mean", "k_in_norm_mean")}
    assert {"loss", "grad_norm", *layers} <= shown


def test_axes_are_logarithmic_where_the_literature_has_them_so(spec: dict[str, Any]) -> None:
    found = panels(spec)
    for title in ("gradient norm", "max |logit|", "max |logit|, worst layer", "‖q‖ that enters the product"):
        assert found[title]["yLogScale"], title
    for title in ("training loss", "entropy of attention (H / ln n)", "attn max"):
        assert not found[title]["yLogScale"], title


def test_fractions_have_their_whole_axis_and_nothing_is_smoothed_or_cut(spec: dict[str, Any]) -> None:
    for title, config in panels(spec).items():
        assert config["smoothingType"] == "none", title
        assert config["ignoreOutliers"] is False, title
        assert config["pointVisualizationMethod"] == "bucketing-gorilla", title
        if "H / ln n" in title or "attn max" in title:
            assert (config["yAxisMin"], config["yAxisMax"]) == (0.0, 1.0), title


def test_runs_are_grouped_by_variant_in_the_colours_of_the_figures(spec: dict[str, Any]) -> None:
    section = spec["view"]["spec"]["section"]
    (runs,) = section["runSets"]
    assert runs["grouping"] == [{"section": "config", "name": "variant.value"}]
    colours = {json.dumps(key): colour for key, colour in section["customRunColors"].items()}
    for variant, look in LOOKS.items():
        assert any(variant in key and colour == look.colour for key, colour in colours.items()), variant
    assert section["settings"]["useRunsTableGroupingInPanels"]


def test_sums_of_sweeps_and_replaced_attempts_are_not_among_the_runs(spec: dict[str, Any]) -> None:
    (runs,) = spec["view"]["spec"]["section"]["runSets"]
    text = json.dumps(runs["filters"])
    assert "jobType" in text
    assert '"train"' in text
    assert "superseded" in text
    assert '"!="' in text


def test_columns_of_the_run_table_are_figures_that_a_run_has(spec: dict[str, Any]) -> None:
    (runs,) = spec["view"]["spec"]["section"]["runSets"]
    columns = runs["runFeed"]["columnOrder"]
    assert {"summary:status", "summary:reason", "summary:step", "summary:verdict"} <= set(columns)
    final = {"loss": 1.0, "val_loss": 1.0}
    outcome = {"reason": "r", "step": 1, "final": final, "best": final, "wall_seconds": 1.0}
    known = set(facts.summary("completed", outcome)) | {"verdict", "claims", "claims_failed", "nonfinite_step"}
    assert {c.partition(":")[2] for c in columns if c.startswith("summary:")} <= known
    config = compose_sweep([], single=True).runs[0][1]
    for column in (c.removeprefix("config:") for c in columns if c.startswith("config:")):
        first, _, rest = column.partition(".value")
        if first != "variant":
            assert hasattr(getattr(config, first), rest.lstrip(".")) if rest else hasattr(config, first), column


def test_pictures_are_those_that_the_mirror_sends() -> None:
    assert set(dashboard.MEDIA) == {f"heads/{metric}" for metric in maps.PICTURES}


def test_the_report_has_the_ablation_figures_and_the_claims(spec: dict[str, Any]) -> None:
    text = json.dumps(spec["report"]["spec"])
    for wanted in ("final/val_loss", "optim.value.lr", "figures/lr_sensitivity", "figures/vit22b_panels", "claims"):
        assert wanted in text, wanted
    assert "2302.05442" in text


# ---------------------------------------------------------------- the verb


def bare(home: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return kept | {"HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_CONFIG_DIR": str(home)} | more


def qkexp(home: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qkexp", "dashboard", *args]
    return subprocess.run(command, env=bare(home, **more), capture_output=True, text=True, timeout=120)


def test_print_needs_neither_login_nor_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked")

    for name, value in bare(tmp_path).items():
        monkeypatch.setenv(name, value)
    for name in [n for n in os.environ if n.startswith("WANDB_API")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert cli.main(["dashboard", "--entity", "team", "--project", "p", "--print"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {printed[part]["entity"] for part in ("view", "report")} == {"team"}
    assert {printed[part]["project"] for part in ("view", "report")} == {"p"}


def test_without_a_login_it_says_what_to_do(tmp_path: Path) -> None:
    done = qkexp(tmp_path, "--entity", "team")
    assert done.returncode == 2
    assert "wandb login" in done.stderr
    assert "--print" in done.stderr


class Views(http.server.BaseHTTPRequestHandler):
    """Of W&B's GraphQL what wandb-workspaces asks for views."""

    stored: dict[str, dict[str, Any]]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"data": self.answer(asked["query"], asked.get("variables") or {})}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "1", "internalId": "1", "name": "project", "entityName": "team", "createdAt": "2026-01-01",
                   "isBenchmark": False, "user": None}  # fmt: skip
        if "upsertView" in query:
            known = given.get("id") or f"view{len(self.stored)}"
            new = known not in self.stored
            kept = {k: given.get(k) for k in ("name", "displayName", "type", "spec", "description")}
            self.stored[known] = kept | {"id": known}
            view = {**self.stored[known], "project": project, "updatedAt": "2026-01-01T00:00:00", "createdAt": None}
            return {"upsertView": {"view": view, "inserted": new}}
        if "allViews" in query:
            if given["project"] != "project":
                return {"project": None}
            nodes = [{"node": v} for v in self.stored.values() if v["type"] == given["kind"]]
            return {"project": {"allViews": {"edges": nodes}}}
        if "viewer" in query:
            teams = {"edges": [{"node": {"name": "team"}}]}
            return {"viewer": {"id": "1", "entity": "team", "username": "u", "flags": "{}", "email": "", "admin": False,
                               "teams": teams, "apiKeys": {"edges": []}, "deletedAt": None}}  # fmt: skip
        page = {"endCursor": None, "hasNextPage": False}
        return {"project": project, "models": {"edges": [{"node": project, "cursor": ""}], "pageInfo": page}}

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def views() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    Views.stored = {}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Views)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Views.stored
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_second_time_replaces_what_the_first_made(
    tmp_path: Path, views: tuple[str, dict[str, dict[str, Any]]], spec: dict[str, Any]
) -> None:
    url, stored = views
    login = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "k" * 40}
    first = qkexp(tmp_path, "--entity", "team", "--project", "project", **login)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("made: ") == 2
    assert sorted(v["displayName"] for v in stored.values()) == sorted([dashboard.VIEW, dashboard.REPORT])
    sent = {v["displayName"]: json.loads(v["spec"]) for v in stored.values()}
    assert len(sent[dashboard.VIEW]["section"]["panelBankConfig"]["sections"]) == len(
        spec["view"]["spec"]["section"]["panelBankConfig"]["sections"]
    )
    names = {v["name"] for v in stored.values()}
    again = qkexp(tmp_path, "--entity", "team", "--project", "project", **login)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("updated: ") == 2
    assert len(stored) == 2
    assert {v["name"] for v in stored.values() if v["type"] == "project-view"} <= names, "its address stays"


def test_a_project_that_is_not_there_is_named(tmp_path: Path, views: tuple[str, dict[str, dict[str, Any]]]) -> None:
    url, stored = views
    done = qkexp(tmp_path, "--entity", "team", "--project", "other", WANDB_BASE_URL=url, WANDB_API_KEY="k" * 40)
    assert done.returncode == 2
    assert "team/other" in done.stderr
    assert not stored
