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
    that attains max |z|; ``none``: the layer has one value, which stands at head -1); ``shards`` the one over
    micro-batches and ranks: the mean of maxima is not a maximum, so each metric says how its parts combine
    (``norm``: root of the sum of squares, ``rms``: of their mean). ``cost`` is what it takes beyond the others:
    ``tokens`` a pass over q and k, ``pairs`` its part of the pass over the scores, ``none`` next to nothing.
    ``limits`` is what it does not tell.
    """

    name: str
    unit: str
    heads: str
    shards: str
    cost: str
    definition: str
    reading: str
    limits: str = ""


METRICS: tuple[Metric, ...] = (
    Metric("q_norm_mean", "1", "mean", "mean", "tokens", "mean ‖q‖₂ of the projection, before any QK norm",
           "raw magnitude; grows under a norm too, where it is harmless",
           "whether logits grow: under a norm they do not follow it"),
    Metric("q_norm_max", "1", "max", "max", "tokens", "max ‖q‖₂ of the projection",
           "raw magnitude of the longest query", "whether that query meets a key that it is aligned with"),
    Metric("k_norm_mean", "1", "mean", "mean", "tokens", "mean ‖k‖₂ of the projection, before any QK norm",
           "as q_norm_mean", "as q_norm_mean"),
    Metric("k_norm_max", "1", "max", "max", "tokens", "max ‖k‖₂ of the projection",
           "raw magnitude of the longest key", "as q_norm_max"),
    Metric("q_in_norm_mean", "1", "mean", "mean", "tokens", "mean ‖q̂‖₂, what enters the dot product",
           "the link of the chain: growth here makes logits grow",
           "alignment: z can grow at constant lengths, and a learned scale multiplies them"),
    Metric("k_in_norm_mean", "1", "mean", "mean", "tokens", "mean ‖k̂‖₂, what enters the dot product",
           "as q_in_norm_mean", "as q_in_norm_mean"),
    Metric("max_logit", "logit", "max", "max", "pairs", "max z, before any cap, masked pairs left out",
           "maxima are comparable only at equal numbers of pairs",
           "sharpness: a row's common offset raises it and changes no weight"),
    Metric("max_abs_logit", "logit", "max", "max", "pairs", "max |z|, before any cap",
           "run-away shows here first", "as max_logit; and one pair of a batch says nothing of the others"),
    Metric("max_pair_q_norm", "1", "max_pair", "max_pair", "none", "‖q̂‖₂ of the pair that attains max |z|",
           "with max_pair_k_norm and max_pair_cos: is it length or alignment that grows?",
           "other pairs; the pair changes from step to step"),
    Metric("max_pair_k_norm", "1", "max_pair", "max_pair", "none", "‖k̂‖₂ of the pair that attains max |z|",
           "log max|z| = log scale + log‖q̂‖ + log‖k̂‖ + log|cos| exactly (without bias)", "as max_pair_q_norm"),
    Metric("max_pair_cos", "1", "max_pair", "max_pair", "none", "cosine of the pair that attains max |z|",
           "signed; 1 or -1 means fully aligned", "the typical cosine: this pair was chosen for being extreme"),
    Metric("max_logit_capped", "logit", "max", "max", "none", "max c; equals max_logit where there is no cap",
           "what softmax sees", "how far beyond the cap z is: see max_logit"),
    Metric("logit_gap_mean", "logit", "mean", "rows", "pairs", "mean over rows of (max z − mean z)",
           "softmax ignores a row's offset: this is what sharpness feels",
           "how many keys share the top: two equal maxima have the gap of one"),
    Metric("entropy_mean", "nats", "mean", "rows", "pairs", "−Σ p log p, mean over rows",
           "0 at one-hot, log n at uniform",
           "a few collapsed rows or heads among many, and whether sharp attention does harm"),
    Metric("entropy_p05", "nats", "mean", "rows", "none", "5th percentile over rows of the entropy",
           "the sharpest rows; a mean of percentiles where parts are combined",
           "which rows they are; of a subsample it is no unbiased estimate"),
    Metric("entropy_frac", "1", "mean", "choices", "none", "mean over rows of H / log n; rows with one key left out",
           "0 one-hot … 1 uniform, comparable across lengths", "as entropy_mean"),
    Metric("collapsed_rows", "1", "mean", "choices", "none", "fraction of rows with H / log n < 0.05",
           "low entropy alone is no fault: some heads are meant to be sharp",
           "where those rows look: at a sink, at themselves, or at what matters"),
    Metric("attn_max_mean", "1", "mean", "rows", "none", "mean over rows of the largest weight",
           "our reading of ViT-22B's “attn max”; the paper's reduction was not found", "as entropy_mean"),
    Metric("score_scale", "1", "mean", "max", "none", "the factor on q̂·k̂", "learned scales move",
           "the size of z, which lengths make too"),
    Metric("score_ulp", "logit", "mean", "max", "none", "spacing of the score's dtype at max |z|",
           "what the kernel's own rounding may add; not mixed into the other metrics",
           "the error itself, which rounding may make smaller, and sums larger"),
    Metric("masked_rows", "rows", "mean", "sum", "none", "rows without an unmasked key, left out of all row statistics",
           "0 unless whole queries are padding", "why; where only some queries are measured, it counts among those"),
    Metric("nonfinite", "values", "mean", "sum", "none", "non-finite values in q̂, k̂ and z",
           "not 0: the metrics that they spoil are absent",
           "where they came from; one value of q̂ counts again in each score that it spoils; and an overflow within a "
           "kernel of less range: compare max_abs_logit / score_scale with 65,504 in FP16"),
)  # fmt: skip

# Metrics that are measured only where they are asked for.
GROUPS: dict[str, tuple[Metric, ...]] = {
    "sink": (
        Metric("sink_mean", "1", "mean", "rows", "none", "mean over rows of the weight of the first key, p₁",
               "the class token of a plain ViT: near 1 where a head rests on it, 1/n at uniform",
               "sinks that are other tokens; whether a sink does harm: resting heads are legitimately low in entropy"),
    ),
    "bound": (
        Metric("entropy_bound_mean", "nats", "mean", "rows", "two passes",
               "mean over rows of the least entropy that ‖c − mean c‖₂ allows (Zhai et al. 2023, theorem 3.1, a row "
               "at a time, without its bound of that length by spectral norms)",
               "never above entropy_mean; near it where one key holds the weight and the others share the rest",
               "collapse by itself: 0 means that the scores are spread widely enough for it"),
    ),
    "spectral": (
        Metric("qk_spectral_norm", "1", "mean", "mean", "weights",
               "‖W_qᵀ W_k‖₂ of the head, of the weights that the forward passes saw; without scale and biases",
               "σ of Zhai et al. 2023: without a QK norm |scale| · σ · ‖x‖ · ‖x'‖ bounds |z| (but for biases)",
               "what inputs make of it; under a QK norm its size means nothing, for the score does not feel it"),
        Metric("input_spectral_norm", "1", "none", "mean", "images",
               "‖X Xᵀ‖₂ of an image's tokens X (N, C) before the projections, mean over images; where these have "
               "biases, of X with a column of ones",
               "σ_x of Zhai et al. 2023; about N · C where normed tokens look alike",
               "which direction it is; absent with a QK norm, and in models of others"),
        Metric("entropy_bound_spectral", "nats", "mean", "mean", "none",
               "theorem 3.1 of Zhai et al. 2023 as published: the least entropy that "
               "S = |scale| · ‖W_qᵀ W_k‖₂ · ‖X Xᵀ‖₂ allows, mean over images; biases of the projections count as one "
               "more channel of W and X",
               "never above entropy_bound_mean; larger than 0 only where weights or tokens are small",
               "next to all: S grows with N · C, and beyond some 100 the bound is 0 in float32. "
               "Absent where input_spectral_norm is"),
    ),
    "activations": (
        Metric("block_in_max", "1", "none", "max", "tokens", "max |x| of the residual stream that enters the block",
               "massive activations (Sun et al. 2024): over 100 and over 1,000 times the median",
               "which channel and token; whether attention rests on that token: see sink_mean"),
        Metric("block_in_peak", "1", "none", "max", "a median",
               "max |x| / median |x| of the residual stream of an image, the largest of the images",
               "1,000 and more: massive activations, if block_in_max is over 100 too",
               "as block_in_max; a median near 0 raises it too"),
        Metric("block_out_rms", "1", "none", "rms", "tokens", "RMS of the residual stream that leaves the block",
               "set mainly by the learning rate (Wortsman et al. 2023, appendix C.1)",
               "whether attention or MLP made it grow"),
    ),
    "gradients": (
        Metric("w_q_grad_norm", "1", "mean", "mean", "weights",
               "‖∂L/∂W_q‖_F of the head, of the gradient as it stands when the step ends, over the scale of the loss",
               "one head far above the others, or above its own past, is where it breaks",
               "the update: Adam divides by the gradient's own size. In this project's runs it is unclipped"),
        Metric("w_k_grad_norm", "1", "mean", "mean", "weights", "‖∂L/∂W_k‖_F of the head", "as w_q_grad_norm",
               "as w_q_grad_norm"),
        Metric("w_v_grad_norm", "1", "mean", "mean", "weights", "‖∂L/∂W_v‖_F of the head",
               "stays where attention is one-hot, while those of W_q and W_k vanish", "as w_q_grad_norm"),
        Metric("score_grad_norm", "1", "mean", "norm", "four products",
               "‖∂L/∂z‖_F over images, queries and keys, computed anew in float32 from ∂L/∂(p·v); of all queries of "
               "the measured images",
               "near 0 where attention is one-hot: softmax passes nothing on to W_q and W_k",
               "what the kernel's rounding makes of it; how it is spread over pairs. Of ranks that average gradients "
               "it is that of the sum of their losses, not of the mean"),
    ),
    "update": (
        Metric("qk_update_ratio", "1", "mean", "mean", "a copy",
               "‖ΔW‖_F / ‖W‖_F of W_q and W_k of the head together: W as the step found it, ΔW what the optimiser's "
               "step made of it, decay included",
               "how far one step turns the projections; compare layers and heads",
               "direction: large updates to and fro lead nowhere"),
    ),
    "gains": (
        Metric("q_gain_max", "1", "max", "max", "none",
               "max |γ_q| over the head's channels, of the weights that the forward passes saw",
               "with k_gain_max and score_scale it bounds |z| under a QK norm: where γ grows, z may",
               "whether the channel is used; the learned scale stands in score_scale"),
        Metric("k_gain_max", "1", "max", "max", "none", "max |γ_k| over the head's channels", "as q_gain_max",
               "as q_gain_max"),
    ),
    "adam": (
        Metric("q_grad_rms_eps", "1", "mean", "mean", "weights",
               "RMS(√v̂) / ε over the head's W_q: Adam's running RMS of the gradient, bias corrected, after the step's "
               "update, over its ε",
               "near 1 and below, ε and not the gradient sets the size of updates, which then shrink "
               "(Wortsman et al. 2023, figures 11 to 13)",
               "single weights whose gradient is far below the RMS; absent where no Adam holds W_q"),
        Metric("k_grad_rms_eps", "1", "mean", "mean", "weights", "RMS(√v̂) / ε over the head's W_k",
               "as q_grad_rms_eps", "as q_grad_rms_eps"),
    ),
}  # fmt: skip

SCORE_GROUPS = ("sink", "bound")  # what q and k alone show; the others look at weights, gradients and the block

NAMES = tuple(m.name for m in METRICS)
COLLAPSED = 0.05


def metrics(groups: Sequence[str] = ()) -> tuple[Metric, ...]:
    """What is always measured, and then the metrics of groups, in the order of the tables."""
    return (*METRICS, *(m for name, group in GROUPS.items() if name in groups for m in group))


def names(groups: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of :func:`metrics`."""
    return tuple(m.name for m in metrics(groups))


def besides(groups: Sequence[str]) -> tuple[Metric, ...]:
    """The metrics of groups that need more than q and k: the last ones of :func:`metrics`."""
    return tuple(m for name, group in GROUPS.items() if name in groups and name not in SCORE_GROUPS for m in group)


BY_NAME = {m.name: m for m in metrics(tuple(GROUPS))}


def headless(names: Sequence[str]) -> bool:
    """Whether one of the metrics stands at head -1."""
    return any(BY_NAME[name].heads == "none" for name in names)


INTRODUCTION = """# Metrics of attention

<!-- generated: python -m qkexp.probe.metrics > docs/metrics.md -->

One number per probed step, layer and head. z = scale · q̂·k̂ + bias is the score, q̂ and k̂ what enters the dot
product (after norm and rotation), c the score after a soft-cap, p = softmax(c) over keys, before dropout; n the
unmasked keys of a row. Natural logarithm; computed in float32 outside autocast. A metric that was not measured is
absent, never 0: where inputs are not finite, `nonfinite` says how many.

`heads` is how a layer's value is made of its heads (`max_pair`: from the head that attains max |z|; `none`: it has no
heads and stands in a row of its own, at head −1); `parts` how micro-batches and ranks combine (`mean`: weighted by
queries, `rows`: by rows with an unmasked key, `choices`: by rows with more than one; `norm`: root of the sum of
squares, `rms`: of their mean). `cost` is what a metric takes beyond the others: `tokens` a pass over q and k,
`pairs` its share of the one pass over the scores, `weights` one over the projections, `none` next to nothing.

**A part of a batch.** `probe.images` measures the first images of a batch, `probe.queries` some rows of each image
against all its keys: row ⌊i·N/m⌋ + φ (modulo N) for i = 0 … m−1, with a phase φ that is another for each image and
probed step and takes each of its N values once in N probed steps; no random number is drawn. Over the phases each row
counts equally often, so means over rows are unbiased. A maximum, a percentile and a count are those of the part
that was measured: a maximum over fewer pairs is smaller. Such frames say `subsampled`, and tables have a column of that
name, true in their rows; compare maxima only at equal numbers of pairs. `q_norm_*` and `k_norm_*` are of all tokens
where there is a QK norm.
"""

GROUP_INTRODUCTION = {
    "sink": 'Rests of attention: `probe.groups=[sink]`, `AttentionProbe(model, groups=("sink",))`.',
    "bound": "How sharp the scores' spread alone lets attention be: `probe.groups=[bound]`.",
    "spectral": """How sharp weights and inputs let attention be, by the spectral norms of Zhai et al. 2023
(sigma-Reparam, arXiv 2303.06296). Power iterations: a norm is approached from below, to within rounding unless many
singular values nearly equal the largest.""",
    "activations": "The residual stream around the block that holds the layer. Sun et al. 2024 is arXiv 2402.17762.",
    "gradients": """What backward brings to the scores and to each head's projections. Absent unless backward runs
within the step; `probe.step(step, loss_scale=...)` says what the loss was multiplied by.""",
    "update": """What the optimiser's step changes: taken within `with probe.step(...)`, or after it and followed by
`probe.updated()`. Absent without either.""",
    "gains": "Learned gains of the QK norms; absent where there are none.",
    "adam": """Needs `AttentionProbe(model, optimizer=...)` and, as `update`, the optimiser's step. Wortsman et al. 2023
is arXiv 2309.14322.""",
}


def markdown() -> str:
    """docs/metrics.md."""
    lines = [INTRODUCTION, *_table(METRICS)]
    for name, group in GROUPS.items():
        lines += ["", f"## Group `{name}`, off by default", "", GROUP_INTRODUCTION[name], "", *_table(group)]
    return "\n".join(lines) + "\n"


def _table(rows: tuple[Metric, ...]) -> list[str]:
    titles = ("metric", "unit", "heads", "parts", "cost", "definition", "how to read it", "what it does not tell")
    out = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for m in rows:
        cells = (f"`{m.name}`", m.unit, m.heads, m.shards, m.cost, m.definition, m.reading, m.limits)
        out.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return out


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
