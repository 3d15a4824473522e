"""The W&B workspace and report for entropy collapse, as wandb-workspaces describes them.

Keys are those that the mirror sends (``attn/L00/<metric>``, ``attn/worst/<metric>``, ``heads/<metric>``, the scalars);
variants have the colours of the figures. Axes are logarithmic where ViT-22B (arXiv 2302.05442, Figure 1) has them
so: logits and gradient norm; norms of q and k are, because they are one factor of the logits each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qkexp.analysis.figures.style import LOOKS
from qkexp.config import UserError
from qkexp.probe.metrics import BY_NAME

VIEW = "qkexp: entropy collapse"
REPORT = "qkexp: which remedy holds"
SHARE = (0.0, 1.0)  # of a key that is a fraction


@dataclass(frozen=True)
class Chart:
    """A line chart against the step: a key of the history, or a pattern of keys with a line each."""

    title: str
    key: str
    unit: str = ""
    log: bool = False
    span: tuple[float | None, float | None] = (None, None)
    pattern: bool = False


def layered(
    metric: str, title: str, *, log: bool = False, span: tuple[float | None, float | None] = (None, None)
) -> Chart:
    """A metric of every layer, a line each."""
    unit = BY_NAME[metric].unit
    return Chart(title, f"attn/L[0-9]+/{metric}", "" if unit == "1" else unit, log, span, pattern=True)


# section -> its charts, in the order of the chain: what broke, where, by what, and what else could have
SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Did it break?": (
        Chart("training loss", "loss", "nats"),
        Chart("validation loss", "val_loss", "nats"),
        Chart("gradient norm", "grad_norm", log=True),
        Chart("max |logit|, worst layer", "attn/worst/max_abs_logit", "logit", log=True),
        Chart("entropy of attention, worst layer (H / ln n)", "attn/worst/entropy_frac", span=SHARE),
        Chart("attn max, worst layer", "attn/worst/attn_max_mean", span=SHARE),
    ),
    "Logits and entropy by layer": (
        layered("max_abs_logit", "max |logit|", log=True),
        layered("entropy_frac", "entropy of attention (H / ln n)", span=SHARE),
        layered("attn_max_mean", "attn max", span=SHARE),
        layered("collapsed_rows", "rows with H / ln n < 0.05", span=SHARE),
        layered("logit_gap_mean", "max - mean of a row's logits", log=True),
        layered("max_pair_cos", "cosine of the pair with max |logit|", span=(-1.0, 1.0)),
    ),
    "Norms of q and k by layer": (
        layered("q_in_norm_mean", "‖q‖ that enters the product", log=True),
        layered("k_in_norm_mean", "‖k‖ that enters the product", log=True),
        layered("q_norm_mean", "‖q‖ of the projection", log=True),
        layered("k_norm_mean", "‖k‖ of the projection", log=True),
        layered("score_scale", "scale of the score", log=True),
    ),
    "Was it attention at all?": (
        Chart("gradient norm: q and k", "grad_norm_qk", log=True),
        Chart("gradient norm: v and output", "grad_norm_vo", log=True),
        Chart("gradient norm: MLP", "grad_norm_mlp", log=True),
        Chart("gradient norm: the rest", "grad_norm_rest", log=True),
        Chart("max |output logit|", "out_logit_absmax", "logit", log=True),
        Chart("RMS of the update / learning rate", "update_rms", log=True),
        Chart("learning rate", "lr"),
        Chart("values that are not finite", "nonfinite", "values"),
    ),
}
# columns of the run table, as W&B addresses them; the reason says in words why a run is called what it is
COLUMNS = (
    "run:displayName", "summary:status", "summary:reason", "summary:verdict", "summary:step",
    "summary:final/val_loss", "summary:final/loss", "summary:nonfinite_step", "summary:claims_failed",
    "config:variant.value", "config:optim.value.lr", "config:seed.value", "run:group",
)  # fmt: skip
MEDIA = ("heads/entropy_frac", "heads/max_abs_logit")
FIGURES = ("figures/vit22b_panels", "figures/lr_sensitivity", "figures/heatmaps")


def modules() -> tuple[Any, Any, Any]:
    """wandb-workspaces: workspaces, reports, expressions.

    Raises:
        UserError: it is not installed.
    """
    try:
        from wandb_workspaces import expr, workspaces
        from wandb_workspaces.reports import v2 as reports
    except ImportError as error:
        raise UserError("wandb-workspaces is not installed: pip install 'qkexp[dashboard]'") from error
    return workspaces, reports, expr


def workspace(entity: str, project: str) -> Any:
    """The saved view: charts of the chain in sections, runs grouped by variant, a table with outcome and reason."""
    ws, wr, expr = modules()
    sections = [
        ws.Section(name=name, panels=[line(chart) for chart in charts], is_open=place < 3)
        for place, (name, charts) in enumerate(SECTIONS.items())
    ]
    sections += [
        ws.Section(name="Heads", panels=[wr.MediaBrowser(title=key, media_keys=[key]) for key in MEDIA]),
        ws.Section(name="Stable at which rate?", panels=[rates()]),
        ws.Section(name="Events", panels=[wr.WeavePanelSummaryTable(table_name="events")]),
    ]
    runs = ws.RunsetSettings(
        filters=trained(),
        groupby=[expr.Config("variant")],
        order=[expr.Ordering(expr.Summary("final/val_loss"), ascending=True)],
        pinned_columns=list(COLUMNS),
        group_colors={variant: look.colour for variant, look in LOOKS.items()},
    )
    settings = ws.WorkspaceSettings(
        x_axis="Step",
        ignore_outliers=False,  # they are what this is about
        point_visualization_method="bucketing",  # keeps each stretch's minimum and maximum
        max_runs=100,
    )
    return ws.Workspace(
        entity=entity, project=project, name=VIEW, sections=sections, settings=settings, runset_settings=runs
    )


def report(entity: str, project: str) -> Any:
    """The ablation as a report: rates, the published panels, the sweep's own figures and claims."""
    _, wr, expr = modules()
    runs = wr.Runset(
        name="runs", filters=trained(),
        groupby=["config.variant"],
    )  # fmt: skip
    swept = wr.Runset(name="sweeps", filters=expr.And(expr.Metric("JobType") == "sweep"))
    published = [*SECTIONS["Did it break?"]]
    return wr.Report(
        entity=entity,
        project=project,
        title=REPORT,
        description="Made by qkexp dashboard; running it again replaces what stands here.",
        width="fluid",
        blocks=[
            wr.H1("Which rate does each variant bear?"),
            wr.P(
                "Each point is a run: its validation loss after the last step against its peak learning rate. A run "
                "that ended early or was not finite has none and is missing here: see status and reason in the table."
            ),
            wr.PanelGrid(runsets=[runs], panels=[_wide(rates())]),
            wr.H1("What happens on the way"),
            wr.P(
                "The panels of ViT-22B's Figure 1 (arXiv 2302.05442) and the entropy beside them: median over the runs "
                "of a variant, band from minimum to maximum. Narrow the run set down to one rate before you compare."
            ),
            wr.PanelGrid(runsets=[runs], panels=[line(chart) for chart in published]),
            wr.H1("By layer"),
            wr.PanelGrid(runsets=[runs], panels=[line(chart) for chart in SECTIONS["Logits and entropy by layer"][:3]]),
            wr.H1("Figures and claims of the sweeps"),
            wr.P("As qkexp drew and checked them from the run directories; a claim has its value, bound and verdict."),
            wr.PanelGrid(
                runsets=[swept],
                panels=[
                    *(_wide(wr.MediaBrowser(title=key, media_keys=[key])) for key in FIGURES),
                    _wide(wr.WeavePanelSummaryTable(table_name="claims")),
                ],
            ),
        ],
    )


def trained() -> Any:
    """Runs, without the sums of sweeps and without attempts that others replaced."""
    _, _, expr = modules()
    return expr.And(expr.Metric("JobType") == "train", expr.Summary("status") != "superseded")


def line(chart: Chart) -> Any:
    """A chart as a panel: median of a group, and the band from its minimum to its maximum."""
    _, wr, _ = modules()
    return wr.LinePlot(
        title=chart.title,
        x="Step",
        y=[] if chart.pattern else [chart.key],
        metric_regex=chart.key if chart.pattern else None,
        title_x="step",
        title_y=chart.unit or None,
        log_y=chart.log,
        range_y=chart.span,
        groupby_aggfunc="median",
        groupby_rangefunc="minmax",
        ignore_outliers=False,
        smoothing_type="none",
        point_visualization_method="bucketing-gorilla",
        max_runs_to_show=100,
    )


def rates() -> Any:
    """Final validation loss against the learning rate, both as Wortsman et al. 2023 (arXiv 2309.14322) plot them."""
    _, wr, _ = modules()
    return wr.ScatterPlot(
        title="final validation loss against the peak learning rate",
        x=wr.Config("optim.lr"),
        y=wr.SummaryMetric("final/val_loss"),
        log_x=True,
        log_y=True,
    )


def _wide(panel: Any) -> Any:
    _, wr, _ = modules()
    panel.layout = wr.Layout(w=24, h=10)
    return panel


def specification(entity: str, project: str) -> dict[str, Any]:
    """View and report as the JSON that W&B stores; needs neither a login nor the network."""
    view, page = workspace(entity, project)._to_model(), report(entity, project)._to_model()
    return {
        "view": {"name": view.display_name, "entity": entity, "project": project, "spec": _plain(view.spec)},
        "report": {"name": page.display_name, "entity": entity, "project": project, "spec": _plain(page.spec)},
    }


def _plain(model: Any) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


# ---------------------------------------------------------------- on the server

FIND = """
query FindViews($entity: String, $project: String, $kind: String) {
    project(name: $project, entityName: $entity) {
        allViews(viewType: $kind) { edges { node { id name displayName } } }
    }
}
"""


def save(entity: str, project: str) -> list[tuple[str, str, bool]]:
    """Save view and report, in the place of those of the same name: (name, address, whether it replaced one).

    Raises:
        wandb.errors.CommError, or another error of wandb's: no such project, no right, or a server without views.
    """
    saved = []
    view = workspace(entity, project)
    found = find(entity, project, "project-view", VIEW)
    if found:
        view._internal_id, view._internal_name = found
    view.save()
    saved.append((VIEW, view.url, found is not None))
    page = report(entity, project)
    found = find(entity, project, "runs", REPORT)
    if found:
        page.id = found[0]
    page.save()
    saved.append((REPORT, page.url, found is not None))
    return saved


def find(entity: str, project: str, kind: str, name: str) -> tuple[str, str] | None:
    """(id, internal name) of a view or report by its name; the first, where there are several.

    Raises:
        UserError: there is no such project.
    """
    import wandb
    from wandb_workspaces._graphql import execute_graphql

    answer = execute_graphql(wandb.Api(), FIND, {"entity": entity, "project": project, "kind": kind})
    if not answer.get("project"):
        raise UserError(f"{entity}/{project}: no such project on W&B; copy runs to it first (qkexp sync DIR)")
    edges: Sequence[dict[str, Any]] = (answer["project"].get("allViews") or {}).get("edges") or []
    nodes = [edge["node"] for edge in edges if edge["node"]["displayName"] == name]
    return (nodes[0]["id"], nodes[0]["name"]) if nodes else None
