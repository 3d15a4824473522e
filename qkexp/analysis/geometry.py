"""What a score can do before any training: each relation computed by the project's own code beside its closed form.

Every function returns a table with the columns ``curve, x, value, closed``: ``value`` is what model and probe
compute (the probe in float32, all else in float64), ``closed`` the formula in float64. d is the width of a head, N the
number of keys, B a bound of |score|.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from qkexp.model.core import soft_cap
from qkexp.model.qk_norm import QKNorm
from qkexp.probe.stats import attention_stats

KEYS = (17, 65, 257)
WIDTHS = (16, 64, 128)


def split_entropy(bound: np.ndarray | float, n: int, high: np.ndarray | int = 1) -> np.ndarray:
    """Entropy, nats, of a softmax over n scores, ``high`` of them at +bound and the others at -bound."""
    rest = (n - np.asarray(high)) * np.exp(-2.0 * np.asarray(bound, dtype=np.float64))
    return np.log(high + rest) + 2.0 * np.asarray(bound) * rest / (high + rest)


def sharpest_split(bound: np.ndarray | float, n: int) -> np.ndarray:
    """How many of n scores within ±bound stand at +bound where the entropy is smallest.

    Along each score the entropy rises, then falls (its slope has the sign of exp(-H) - p), so its minima are corners of
    the box. One high score is the sharpest only for a large enough bound: at 17 keys from 2 on, at 257 from 4 on.
    """
    high = np.arange(1, n)
    return high[split_entropy(np.asarray(bound, dtype=np.float64)[..., None], n, high).argmin(-1)]


def entropy_floor(bound: np.ndarray | float, n: int) -> np.ndarray:
    """Smallest entropy, nats, of a softmax over n scores within ±bound."""
    return split_entropy(bound, n, sharpest_split(bound, n))


def gap_entropy(gap: np.ndarray, n: int) -> np.ndarray:
    """Entropy, nats, of a softmax where one of n scores stands ``gap`` above the others, which are equal."""
    return split_entropy(np.asarray(gap) / 2.0, n)


def lengths_to_one_hot(lengths: np.ndarray, d: int = 64, cosine: float = 0.5) -> pd.DataFrame:
    """Entropy against ‖q‖ = ‖k‖ at fixed directions: one key at ``cosine`` to the query, the others at a right angle.

    The score's scale is 1/√d, so the gap is cosine · length² / √d.
    """
    parts = []
    for n in KEYS:
        q, k = torch.zeros(1, 1, 1, d), torch.zeros(1, 1, n, d)
        q[..., 0], k[0, 0, 0, 0], k[0, 0, 0, 1] = 1.0, cosine, (1.0 - cosine**2) ** 0.5
        k[0, 0, 1:, 2] = 1.0
        size = torch.tensor(lengths, dtype=torch.float32).view(1, -1, 1, 1)  # a head for each length
        found = attention_stats(q * size, k * size, d**-0.5)["entropy_mean"]
        closed = gap_entropy(cosine * lengths**2 / np.sqrt(d), n)
        parts.append(_table(f"N = {n}", lengths, found, closed))
    return pd.concat(parts, ignore_index=True)


def length_bound(lengths: np.ndarray, d: int = 64) -> pd.DataFrame:
    """max |q·k| against ‖q‖ = ‖k‖: parallel vectors reach the product of lengths (Cauchy and Schwarz), then scaled."""
    parts = []
    for name, scale in (("q·k", 1.0), (f"q·k / √{d}", d**-0.5)):
        x = torch.zeros(1, len(lengths), 1, d)
        x[..., 0] = torch.tensor(lengths, dtype=torch.float32).view(1, -1, 1)
        found = attention_stats(x, x, scale)["max_abs_logit"]
        parts.append(_table(name, lengths, found, scale * np.asarray(lengths, dtype=np.float64) ** 2))
    return pd.concat(parts, ignore_index=True)


def gain_bound(gains: np.ndarray) -> pd.DataFrame:
    """Largest |score| under RMSNorm and 1/√d when one channel's gain of q and k has grown to g: √d · g².

    Reached by q and k that lie along that channel; at g = 1 any pair of parallel vectors reaches √d (11.31 at d = 128).
    """
    parts = []
    for d in WIDTHS:
        norm = QKNorm(1, d, kind="rms", gain="shared", eps=1e-12).double()
        x = torch.zeros(1, 1, 1, d, dtype=torch.float64)
        x[..., 0] = 3.0  # of any length: the norm takes it away
        found = []
        for gain in gains:
            with torch.no_grad():
                assert norm.weight is not None
                norm.weight[0] = float(gain)
                y = norm(x)
            found.append(float((y * y).sum()) * d**-0.5)
        parts.append(_table(f"d = {d}", gains, torch.tensor(found), np.sqrt(d) * np.asarray(gains) ** 2))
    return pd.concat(parts, ignore_index=True)


def bounded_entropy(bounds: np.ndarray) -> pd.DataFrame:
    """The least entropy that |score| <= B allows, at its minimiser, against B."""
    parts = []
    for n in KEYS:
        high = torch.from_numpy(sharpest_split(bounds, n)).view(1, -1, 1, 1)
        q, k = torch.ones(1, len(bounds), 1, 1), torch.where(torch.arange(n).view(1, 1, -1, 1) < high, 1.0, -1.0)
        k *= torch.tensor(bounds, dtype=torch.float32).view(1, -1, 1, 1)
        found = attention_stats(q, k, 1.0)["entropy_mean"]
        parts.append(_table(f"N = {n}", bounds, found, entropy_floor(bounds, n)))
    return pd.concat(parts, ignore_index=True)


def capped_gradient(scores: np.ndarray, caps: tuple[float, ...] = (30.0, 50.0)) -> pd.DataFrame:
    """∂c/∂z of c = cap · tanh(z / cap) against z: sech²(z / cap)."""
    parts = []
    for cap in caps:
        gradient = _slope(lambda z, cap=cap: soft_cap(z, cap), scores)  # type: ignore[misc]
        parts.append(_table(f"cap {cap:g}", scores, gradient, 1.0 / np.cosh(np.asarray(scores) / cap) ** 2))
    return pd.concat(parts, ignore_index=True)


def softmax_gradient(gaps: np.ndarray) -> pd.DataFrame:
    """∂p/∂z of the largest of two weights against the gap of their scores: p (1 - p), p the weight itself."""
    gradient = _slope(lambda z: torch.stack([z, torch.zeros_like(z)], -1).softmax(-1)[..., 0], gaps)
    p = 1.0 / (1.0 + np.exp(-np.asarray(gaps, dtype=np.float64)))
    return _table("p (1 − p)", gaps, gradient, p * (1.0 - p))


def _slope(function: Callable[[Tensor], Tensor], at: np.ndarray) -> Tensor:
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    return slope


def _table(curve: str, x: np.ndarray, value: Tensor, closed: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"curve": curve, "x": np.asarray(x, float), "value": value.double().numpy(), "closed": closed})
