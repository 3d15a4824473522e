"""The one table of attention metrics: name, unit, how it is reduced, how to read it.

The Parquet columns, the W&B keys and docs/metrics.md derive from it; the formulas stand in
:mod:`qkexp.probe.stats`. z is the score (scale · q̂·k̂ + bias), c the capped score, p the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One number per layer and head.

    ``heads`` is the reduction that makes a layer's value from its heads (``max_pair``: from the head
    that attains max |z|); ``shards`` the one over micro-batches and ranks: the mean of maxima is not
    a maximum, so each metric says how its parts combine.
    """

    name: str
    unit: str
    heads: str
    shards: str
    definition: str
    reading: str


METRICS: tuple[Metric, ...] = (
    Metric("q_norm_mean", "1", "mean", "mean", "mean ‖q‖₂ of the projection, before any QK norm",
           "raw magnitude; grows under a norm too, where it is harmless"),
    Metric("q_norm_max", "1", "max", "max", "max ‖q‖₂ of the projection", "raw magnitude of the longest query"),
    Metric("k_norm_mean", "1", "mean", "mean", "mean ‖k‖₂ of the projection, before any QK norm",
           "as q_norm_mean"),
    Metric("k_norm_max", "1", "max", "max", "max ‖k‖₂ of the projection", "raw magnitude of the longest key"),
    Metric("q_in_norm_mean", "1", "mean", "mean", "mean ‖q̂‖₂, what enters the dot product",
           "the link of the chain: growth here makes logits grow"),
    Metric("k_in_norm_mean", "1", "mean", "mean", "mean ‖k̂‖₂, what enters the dot product", "as q_in_norm_mean"),
    Metric("max_logit", "logit", "max", "max", "max z, before any cap, masked pairs left out",
           "maxima are comparable only at equal numbers of pairs"),
    Metric("max_abs_logit", "logit", "max", "max", "max |z|, before any cap", "run-away shows here first"),
    Metric("max_pair_q_norm", "1", "max_pair", "max_pair", "‖q̂‖₂ of the pair that attains max |z|",
           "with max_pair_k_norm and max_pair_cos: is it length or alignment that grows?"),
    Metric("max_pair_k_norm", "1", "max_pair", "max_pair", "‖k̂‖₂ of the pair that attains max |z|",
           "log max|z| = log scale + log‖q̂‖ + log‖k̂‖ + log|cos| exactly (without bias)"),
    Metric("max_pair_cos", "1", "max_pair", "max_pair", "cosine of the pair that attains max |z|",
           "signed; 1 or -1 means fully aligned"),
    Metric("max_logit_capped", "logit", "max", "max", "max c; equals max_logit where there is no cap",
           "what softmax sees"),
    Metric("logit_gap_mean", "logit", "mean", "mean", "mean over rows of (max z − mean z)",
           "softmax ignores a row's offset: this is what sharpness feels"),
    Metric("entropy_mean", "nats", "mean", "mean", "−Σ p log p, mean over rows", "0 at one-hot, log n at uniform"),
    Metric("entropy_p05", "nats", "mean", "mean", "5th percentile over rows of the entropy",
           "the sharpest rows; a mean of percentiles where parts are combined"),
    Metric("entropy_frac", "1", "mean", "mean", "mean over rows of H / log n; rows with one key left out",
           "0 one-hot … 1 uniform, comparable across lengths"),
    Metric("collapsed_rows", "1", "mean", "mean", "fraction of rows with H / log n < 0.05",
           "low entropy alone is no fault: some heads are meant to be sharp"),
    Metric("attn_max_mean", "1", "mean", "mean", "mean over rows of the largest weight",
           "our reading of ViT-22B's “attn max”; the paper's reduction was not found"),
    Metric("score_scale", "1", "mean", "max", "the factor on q̂·k̂", "learned scales move"),
    Metric("score_ulp", "logit", "mean", "max", "spacing of the score's dtype at max |z|",
           "what the kernel's own rounding may add; not mixed into the other metrics"),
    Metric("masked_rows", "rows", "mean", "sum", "rows without an unmasked key, left out of all row statistics", ""),
    Metric("nonfinite", "values", "mean", "sum", "non-finite values in q̂, k̂ and z",
           "not 0: the metrics that they spoil are absent"),
)  # fmt: skip

NAMES = tuple(m.name for m in METRICS)
COLLAPSED = 0.05

GROUPS: dict[str, tuple[Metric, ...]] = {}


def metrics(groups: Sequence[str] = ()) -> tuple[Metric, ...]:
    """What is always measured, and then the metrics of groups, in the order of the tables."""
    return (*METRICS, *(m for name, group in GROUPS.items() if name in groups for m in group))


def names(groups: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of :func:`metrics`."""
    return tuple(m.name for m in metrics(groups))


BY_NAME = {m.name: m for m in metrics(tuple(GROUPS))}


INTRODUCTION = """# Metrics of attention

<!-- generated: python -m qkexp.probe.metrics > docs/metrics.md -->

One number per probed step, layer and head. z = scale · q̂·k̂ + bias is the score, q̂ and k̂ what enters the dot
product (after norm and rotation), c the score after a soft-cap, p = softmax(c) over keys, before dropout; n the
unmasked keys of a row. Natural logarithm; computed in float32 outside autocast. A metric that was not measured is
absent, never 0: where inputs are not finite, `nonfinite` says how many.

`heads` is how a layer's value is made of its heads (`max_pair`: from the head that attains max |z|); `parts` how
micro-batches and ranks combine.
"""


def markdown() -> str:
    """docs/metrics.md."""
    lines = [
        INTRODUCTION,
        "| metric | unit | heads | parts | definition | how to read it |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{m.name}` | {m.unit} | {m.heads} | {m.shards} | {_cell(m.definition)} | {_cell(m.reading)} |"
        for m in METRICS
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
