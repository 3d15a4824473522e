"""The typed schema of every configuration key, the checks across keys, and a run's identity.

A key is one dataclass field made by :func:`key`: default, one sentence, accepted values, and whether
it belongs to the run's identity. Everything that a user may set stands here and nowhere else.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from omegaconf import II, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

SCHEMA_VERSION = 1
# those of qkexp.probe.metrics
PROBE_GROUPS = ("sink", "bound", "spectral", "activations", "gradients", "update", "gains", "adam")
LEARNED_SCALES = ("learned", "learned_per_head", "ssmax")


@dataclass(frozen=True)
class DataFacts:
    """A data set as it is stored: side of an image in pixels, channels, classes, training images."""

    size: int
    channels: int
    classes: int | None = None  # None: the folder says
    samples: int | None = None


DATA_SETS = {
    "digits": DataFacts(8, 1, 10, 1437),
    "synthetic": DataFacts(32, 3, 10, 512),  # unless its keys say otherwise
    "fashion_mnist": DataFacts(28, 1, 10, 60_000),
    "cifar10": DataFacts(32, 3, 10, 50_000),
    "cifar100": DataFacts(32, 3, 100, 50_000),
    "imagefolder": DataFacts(224, 3),
}


class UserError(Exception):
    """The user's input was wrong. The command line prints it and exits with 2, without a traceback."""


class ConfigError(UserError):
    """A key has a value that is not accepted."""

    def __init__(self, key: str, value: Any, accepted: str):
        super().__init__(f"{key}: {value!r} is not accepted; accepted: {accepted}")
        self.key, self.value, self.accepted = key, value, accepted


class DataMissing(ConfigError):
    """A data set is not on disk, and may not be fetched."""


def key(
    default: Any,
    doc: str,
    *,
    identity: bool = True,
    choices: tuple[Any, ...] | None = None,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A configuration key. ``low`` is the smallest accepted number, ``above``/``below`` open bounds."""
    meta = {"doc": doc, "identity": identity, "choices": choices, "low": low, "above": above, "below": below}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass
class ModelConfig:
    name: str = key("vit_tiny_patch16_224", "A plain timm VisionTransformer; the keys below override its sizes.")
    width: int | None = key(None, "Channels of a token; null keeps timm's.", low=1)
    depth: int | None = key(None, "Number of blocks; null keeps timm's.", low=1, below=10_000)
    heads: int | None = key(None, "Attention heads of a block; must divide the width.", low=1)
    patch: int | None = key(None, "Side of a patch in pixels; must divide the image size.", low=1)
    mlp_ratio: float | None = key(
        None, "Hidden channels of the MLP over the width; null keeps timm's.", above=0.0, below=3e38
    )
    qkv_bias: bool | None = key(
        None, "Bias of the q, k, v projections; null keeps timm's (none with block_norm=parallel)."
    )
    block_norm: str = key(
        "pre",
        "Where a block's norms stand; parallel is ViT-22B's block (model/blocks.py has the formulas).",
        choices=("pre", "post", "res_post", "none", "parallel"),
    )
    registers: int | None = key(None, "Register tokens; null keeps timm's.", low=0)
    rope: str = key(
        "none",
        "Rotation of q and k. axial: half of a head's channels by the patch's column, half by its row; class and "
        "register tokens do not turn, and the position embedding stays.",
        choices=("none", "axial"),
    )
    pool: str | None = key(
        None,
        "What the head reads: a class token, the mean of the patches, or attention pooling (MAP); null keeps timm's.",
        choices=("token", "avg", "map"),
    )
    dropout: float = key(0.0, "Dropout after the position embedding, attention and MLP.", low=0.0, below=1.0)
    drop_path: float = key(0.0, "Stochastic depth of the last block; it grows linearly from 0.", low=0.0, below=1.0)
    layer_scale: float | None = key(
        None, "Start of a learned factor a channel on each branch; null keeps timm's.", above=0.0, below=3e38
    )
    seed: int = key(II("seed"), "Seed of the initial weights.", low=0, below=2**63)


@dataclass
class AttentionConfig:
    norm: str = key(
        "none",
        "Norm of q and k. center: no norm, only their mean is subtracted.",
        choices=("none", "rms", "l2", "center"),
    )
    center: bool = key(False, "Subtract the mean before the norm (rms + center = LayerNorm).")
    axis: str = key("head", "Normalise over a head's channels, or over all heads together.", choices=("head", "all"))
    gain: str = key(
        "none",
        "Learned gain: shared (d,), per_head (H, d); with axis=all either is (H*d,).",
        choices=("none", "shared", "per_head"),
    )
    gain_offset: int = key(0, "0: gain starts at 1. 1: gain is 1 + w and w starts at 0.", choices=(0, 1))
    bias: bool = key(False, "Learned bias after the gain.")
    eps: float = key(1e-6, "Added to the mean square before the root, the same in every norm.", above=0.0)
    norm_dtype: str = key("fp32", "Arithmetic of the norm; the result is cast back.", choices=("fp32", "compute"))
    rope_order: str = key(
        "norm_first",
        "Norm before or after the rotation; inert without model.rope, and under an RMS or L2 norm without gain.",
        choices=("norm_first", "rope_first"),
    )
    scale: str = key(
        "inv_sqrt_d",
        "Factor on the dot product. learned: s, one a layer. learned_per_head: s, one a head. ssmax: s ln N / sqrt(d), "
        "s one a head.",
        choices=("inv_sqrt_d", "one", "fixed", *LEARNED_SCALES),
    )
    scale_init: float | None = key(
        None,
        "The fixed value, or the start of a learned s; null = log2(N^2 - N), for ssmax 1 / ln N (plain attention).",
        above=0.0,
        below=3e38,
    )
    scale_log: bool = key(False, "Learn log s instead of s: s stays positive, and steps are relative.")
    scale_max: float | None = key(
        None, "Largest value of a learned s, which gets no gradient above it; null = none.", above=0.0, below=3e38
    )
    softcap: float | None = key(None, "Soft-cap of the score; null = none.", above=0.0, below=3e38)
    score_dtype: str = key("compute", "Precision of the scores in the kernel.", choices=("compute", "fp32"))
    dropout: float = key(
        0.0, "Share of the attention weights dropped in training; the probe sees them before.", low=0.0, below=1.0
    )
    gate: str = key(
        "none",
        "Factor sigmoid(W x) on the output of each head, or of each of its channels, before the output projection.",
        choices=("none", "head", "channel"),
    )
    init: str = key(
        "timm",
        "timm: std 0.02. match: W_q, W_k of un-normed variants scaled to RMSNorm's spread of logits at step 0.",
        choices=("timm", "match"),
    )
    backend: str = key(
        "auto", "Kernel; auto follows the fixed table.", identity=False, choices=("auto", "explicit", "sdpa", "flex")
    )
    temperature: float = key(
        1.0, "The score is divided by it, in the steps that the next two keys name.", above=0.0, below=3e38
    )
    temperature_from: int = key(0, "The first step with attention.temperature.", low=0)
    temperature_until: int | None = key(None, "The first step without it again; null = to the end.", low=1)


@dataclass
class DataConfig:
    name: str = key("digits", "Data set.", choices=tuple(DATA_SETS))
    image_size: int | None = key(None, "Side of an image in pixels; null = the data set's own.", low=1)
    classes: int | None = key(None, "Number of classes (synthetic only); null = the data set's own.", low=2)
    samples: int | None = key(None, "Training images (synthetic only); a quarter more are validation.", low=2)
    seed: int = key(
        II("seed"), "Seed of sample order, augmentation, label noise and synthetic images.", low=0, below=2**63
    )
    root: str | None = key(
        None, "Folder of the data set (for imagefolder: of train and val); null = the user's cache.", identity=False
    )
    download: bool = key(False, "Fetch data that is not there before the first run starts.", identity=False)
    workers: int = key(0, "Processes that read and augment; 0 = the run itself.", identity=False, low=0)
    crop: str = key(
        "none",
        "Random crop: pad = by an eighth of the side, then crop; resized = of random area and aspect.",
        choices=("none", "pad", "resized"),
    )
    flip: bool = key(False, "Mirror half of the training images.")
    randaugment: int = key(0, "RandAugment: operations an image; 0 = none.", low=0)
    randaugment_magnitude: int = key(9, "RandAugment: strength of an operation, 0 to 30.", low=0, below=31)
    mixup: float = key(0.0, "Mixup: alpha of Beta(alpha, alpha), a share drawn for each image; 0 = none.", low=0.0)
    label_noise: float = key(
        0.0, "Share of the training labels replaced by another class, in [0, 1).", low=0.0, below=1.0
    )
    poison: str = key(
        "none",
        "What poison_steps do to a batch: labels = random ones; images = multiplied by 100; nan = not a number.",
        choices=("none", "labels", "images", "nan"),
    )
    poison_steps: list[int] = key([], "Steps whose batches are poisoned, in rising order.")


@dataclass
class OptimConfig:
    name: str = key(
        "adamw",
        "Optimiser. muon: of the blocks' matrices, with AdamW for all else.",
        choices=("adam", "adamw", "sgd", "muon"),
    )
    lr: float = key(1e-3, "Peak learning rate, reached exactly at the end of the warm-up.", above=0.0)
    warmup: int = key(0, "Steps of linear warm-up from 0; as long as the run or longer: a ramp.", low=0)
    schedule: str = key(
        "cosine",
        "What follows the warm-up; rsqrt falls as 1/sqrt(step) on the scale of the warm-up.",
        choices=("cosine", "constant", "linear", "rsqrt"),
    )
    cooldown: int = key(0, "Last steps of rsqrt, linear to 0.", low=0)
    weight_decay: float = key(
        0.0, "Decay of weight matrices; never of gains, biases, learned scales.", low=0.0, below=3e38
    )
    decay: str = key(
        "independent",
        "independent: decay follows the schedule, not the peak rate; coupled: multiplied by the rate.",
        choices=("independent", "coupled"),
    )
    betas: list[float] = key([0.9, 0.999], "Adam's averaging of gradient and squared gradient, each in [0, 1).")
    eps: float = key(1e-8, "Adam's epsilon.", above=0.0)
    momentum: float = key(0.9, "Momentum of sgd and muon, in [0, 1).", low=0.0, below=1.0)
    qk_lr_scale: float = key(
        1.0, "Factor on the updates of the Q and K projections; 0 freezes them.", low=0.0, below=3e38
    )
    gain_decay: float = key(
        0.0,
        "Decay of the QK norms' gains, as weight_decay acts on matrices: towards 0, or with attention.gain_offset=1 "
        "towards a gain of 1.",
        low=0.0,
        below=3e38,
    )
    head_lr_scale: float = key(
        1.0, "Factor on the updates of the classifier, for controls: its logits alone drift.", low=0.0, below=3e38
    )


@dataclass
class PrecisionConfig:
    autocast: str = key(
        "bf16",
        "Compute type of matrix products under autocast; fp16 scales the loss.",
        choices=("none", "bf16", "fp16"),
    )
    weights: str = key(
        "fp32",
        "Type of weights, gradients and optimiser state; bf16 rounds small updates away.",
        choices=("fp32", "bf16"),
    )


@dataclass
class TrainConfig:
    steps: int = key(400, "Optimiser steps.", low=1)
    batch_size: int = key(64, "Images of a microbatch.", low=1)
    accumulate: int = key(1, "Microbatches a step, whose gradients are averaged.", low=1)
    loss: str = key(
        "ce",
        "ce: cross-entropy. sigmoid: binary cross-entropy summed over classes (ViT-22B).",
        choices=("ce", "sigmoid"),
    )
    label_smoothing: float = key(0.0, "Share of a label spread over all classes, in [0, 1).", low=0.0, below=1.0)
    clip_norm: float | None = key(None, "Largest gradient norm; null = no clipping.", above=0.0)
    eval_every: int = key(0, "Validation every so many steps; 0 = at the end only.", identity=False, low=0)
    checkpoint_every: int = key(0, "Checkpoint every so many steps; 0 = at the end only.", identity=False, low=0)
    timeout: float | None = key(
        None, "Seconds after which a run that has not ended is killed, and has failed.", identity=False, above=0.0
    )


@dataclass
class ProbeConfig:
    every: int = key(1, "Probe every so many steps; 0 = never.", identity=False, low=0)
    images: Any = key("all", "Images of the batch that are measured: a number, or all.", identity=False)
    queries: Any = key(
        "all", "Queries of an image that are measured, against all its keys: a number, or all.", identity=False
    )
    groups: list[str] = key([], f"Further metrics (docs/metrics.md): any of {', '.join(PROBE_GROUPS)}.", identity=False)


@dataclass
class TrackerConfig:
    name: str = key("wandb", "Where runs are mirrored.", identity=False, choices=("none", "wandb"))
    project: str = key("qkexp", "W&B project.", identity=False)
    mode: str = key(
        "auto", "auto: online where logged in, else offline.", identity=False, choices=("auto", "online", "offline")
    )


@dataclass
class BranchConfig:
    parent: str | None = key(None, "Identity of the run that this one goes on from; `qkexp branch` sets it.")
    step: int | None = key(None, "Steps that it has from its parent; `qkexp branch` sets it.", low=1)


@dataclass
class RunConfig:
    """The root of the schema: one run."""

    seed: int = key(0, "Seed of the run; model.seed and data.seed follow it.", low=0, below=2**63)
    experiment: str | None = key(None, "Name of the experiment that the run belongs to.", identity=False)
    sweep_name: str | None = key(None, "Folder under output_dir; null = the experiment's name.", identity=False)
    output_dir: str = key("outputs", "Folder that holds all sweeps.", identity=False)
    device: str = key("auto", "Where the run computes.", identity=False, choices=("auto", "cpu", "cuda"))
    compile: bool = key(False, "Train through torch.compile (on CPU it needs a C++ compiler).", identity=False)
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    branch: BranchConfig = field(default_factory=BranchConfig)


@dataclass
class BisectConfig:
    low: float | None = key(None, "Lowest rate of the search; null: no search.", identity=False, above=0.0, below=3e38)
    high: float | None = key(None, "Highest rate of the search.", identity=False, above=0.0, below=3e38)
    factor: float = key(1.5, "Largest ratio of a bracket's two rates.", identity=False, above=1.0, below=3e38)


@dataclass
class LauncherConfig:
    """Keys of the launchers, as ``hydra.launcher.KEY``; configs/hydra/launcher says which of them each one has."""

    workers: int | None = key(None, "Runs at once.", identity=False, low=1)
    threads: int | None = key(None, "CPU threads of a run.", identity=False, low=1)
    gpus: float | None = key(
        None, "Share of a GPU that a run takes, in (0, 1].", identity=False, above=0.0, below=1.001
    )
    timeout_min: int = key(240, "Time limit of a job in minutes.", identity=False, low=1)
    partition: str | None = key(None, "Slurm's partition.", identity=False)
    account: str | None = key(None, "Slurm's account.", identity=False)
    qos: str | None = key(None, "Slurm's quality of service.", identity=False)
    mem_gb: float | None = key(None, "Memory of a job in GB.", identity=False, above=0.0)
    array_parallelism: int | None = key(None, "Jobs of an array at once.", identity=False, low=1)
    additional_parameters: dict[str, Any] | None = key(None, "Other lines of sbatch.", identity=False)
    setup: list[str] | None = key(None, "Shell lines before a job starts.", identity=False)
    address: str | None = key(None, "Of an existing Ray cluster.", identity=False)


@dataclass
class ExperimentConfig(RunConfig):
    """What an experiment file may say beyond a run: more than one grid, a search, its claims and its figures."""

    runs: Any = key(
        None,
        "Grids beside one another: a list of {KEY: VALUES}, each crossed with the axes; [] in an experiment's file: "
        "it trains nothing.",
        identity=False,
    )
    bisect: BisectConfig = field(default_factory=BisectConfig)

    expect: Any = key(None, "Claims that `qkexp verify` checks.", identity=False)
    optional_data: bool = key(
        False, "Without its data set `qkexp reproduce` says so in one line and exits with 0.", identity=False
    )
    figures: Any = key(None, "Figures that `qkexp figures` draws; null = all that fit the runs.", identity=False)


@dataclass(frozen=True)
class Key:
    """One leaf of the schema: dotted name, annotated type, default and what :func:`key` said of it."""

    name: str
    type: str
    default: Any
    meta: dict[str, Any]


@cache
def keys(schema: type = RunConfig, prefix: str = "") -> tuple[Key, ...]:
    """Every leaf key of the schema, depth first in the order of the file."""
    found: list[Key] = []
    for f in dataclasses.fields(schema):
        name = prefix + f.name
        if f.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(f.default_factory):
            found += keys(f.default_factory, name + ".")
        else:
            default = f.default
            if f.default_factory is not dataclasses.MISSING:
                default = f.default_factory()
            found.append(Key(name, str(f.type), default, dict(f.metadata)))
    return tuple(found)


def to_typed(config: Any) -> RunConfig:
    """A plain or OmegaConf mapping of run keys -> RunConfig, types checked and interpolations resolved."""
    typed: Any = _by_section(config) if type(config) is dict else None
    if typed is None:
        merged = OmegaConf.merge(_schema(RunConfig), config)
        OmegaConf.resolve(merged)
        typed = OmegaConf.to_object(merged)
    assert isinstance(typed, RunConfig)
    return typed


def _by_section(config: dict[str, Any]) -> RunConfig | None:
    """A configuration that was written whole, a section at a time: of a sweep's runs, most sections are equal.

    None where a key is missing or wrong, or follows another one: then only the whole tells.
    """
    sections: dict[str, type] = {
        name: type(default) for name, default in vars(RunConfig()).items() if dataclasses.is_dataclass(default)
    }
    try:
        if "${" in json.dumps(config) or not _is_whole(RunConfig, config):
            return None
        if not all(_is_whole(schema, config[name]) for name, schema in sections.items()):
            return None
        own = _section(RunConfig, json.dumps({k: v for k, v in config.items() if k not in sections}))
        read = {name: copy.deepcopy(_section(schema, json.dumps(config[name]))) for name, schema in sections.items()}
    except (AttributeError, TypeError, OmegaConfBaseException):
        return None
    return dataclasses.replace(own, **read)


def _is_whole(schema: type, config: dict[str, Any]) -> bool:
    return config.keys() == {f.name for f in dataclasses.fields(schema)}


@lru_cache(4096)
def _section(schema: type, text: str) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(_schema(schema), json.loads(text)))


@cache
def _schema(schema: type) -> DictConfig:
    """Made once; merging copies it."""
    return OmegaConf.structured(schema)


def flatten(cfg: RunConfig) -> dict[str, Any]:
    """RunConfig -> {dotted key: value}."""

    def value(name: str) -> Any:
        node: Any = cfg
        for part in name.split("."):
            node = getattr(node, part)
        return node

    return {k.name: value(k.name) for k in keys()}


def as_dict(cfg: RunConfig) -> dict[str, Any]:
    """RunConfig -> a plain nested dictionary."""
    return dataclasses.asdict(cfg)


def identity_keys(cfg: RunConfig) -> dict[str, Any]:
    """The identity keys whose values differ from the schema's defaults.

    ``data.root`` is one for ``imagefolder`` alone: there it says which images, elsewhere only where they lie.
    """
    defaults, chosen = _defaults(cfg.seed), flatten(cfg)
    names = [k.name for k in keys() if k.meta["identity"] or (k.name, cfg.data.name) == ("data.root", "imagefolder")]
    return {name: chosen[name] for name in names if chosen[name] != defaults[name]}


@cache
def _defaults(seed: int) -> dict[str, Any]:
    """The schema's defaults, flat, with the seeds that follow the run's."""
    return {**flatten(to_typed({"seed": seed})), "seed": 0}


def identity(cfg: RunConfig) -> str:
    """Hash of :func:`identity_keys` and the schema's version: what makes two runs the same run."""
    text = json.dumps({"schema": SCHEMA_VERSION, **identity_keys(cfg)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def image_size(data: DataConfig) -> int:
    """Side of an image in pixels: as set, or the data set's own."""
    return data.image_size or DATA_SETS[data.name].size


def head_width(model: ModelConfig) -> int:
    """Channels of a head, where the config sets them; else 64, as in timm's plain ViTs."""
    return model.width // model.heads if model.width and model.heads else 64
