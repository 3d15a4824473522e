"""Configuration: the schema, identity, names, and every way in which input can be wrong."""

from __future__ import annotations

import re

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qkexp.checks import check
from qkexp.compose import compose_changes, compose_sweep, options
from qkexp.config import ConfigError, RunConfig, UserError, as_dict, identity, identity_keys, keys, to_typed
from qkexp.naming import run_name, variant


def one(*overrides: str) -> RunConfig:
    return compose_sweep(overrides, single=True).runs[0][1]


WRONG = {
    "attention=nosuch": ("attention", "nosuch", "rmsnorm"),
    "optim.lr=abc": ("optim.lr", "abc", "a finite number > 0"),
    "optim.lr=nan": ("optim.lr", "nan", "a finite number > 0"),
    "optim.lr=-1": ("optim.lr", "-1", "> 0"),
    "model.depth=-1": ("model.depth", "-1", ">= 1"),
    "model.depth=2.5": ("model.depth", "2.5", "whole number"),
    "train.steps=0": ("train.steps", "0", ">= 1"),
    "nosuchkey=1": ("nosuchkey", "nosuchkey=1", "accepted"),
    "optim.lrr=1": ("optim.lrr", "optim.lrr=1", "optim.lr"),
    "+typo=1": ("typo", "+typo=1", "not added"),
    "~optim.lr": ("optim.lr", "~optim.lr", "deleted"),
    "a==b": ("a==b", "a==b", "KEY=VALUE"),
    "probe.images=0": ("probe.images", "0", "all"),
    "probe.queries=0": ("probe.queries", "0", "all"),
    "probe.queries=some": ("probe.queries", "some", "all"),
    "probe.groups=[sinks]": ("probe.groups", "sinks", "sink"),
    "optim.betas=[0.9,1.0]": ("optim.betas", "1.0", "[0, 1)"),
    "train.batch_size=2000": ("train.batch_size", "2000", "1437"),
    "model.patch=3": ("model.patch", "3", "divisor"),
    "model.heads=5": ("model.heads", "5", "divisor"),
    "data.image_size=28": ("data.image_size", "28", "8"),
    "sweep_name=../x": ("sweep_name", "../x", "folder name"),
}


@pytest.mark.parametrize("override", WRONG)
def test_wrong_input_names_key_value_and_what_is_accepted(override: str) -> None:
    with pytest.raises(UserError) as error:
        one(override)
    for part in WRONG[override]:
        assert part in str(error.value)


@pytest.mark.parametrize("cap", ["0", "-5", "inf", "nan"])
def test_soft_cap_that_is_no_cap_is_refused(cap: str) -> None:
    with pytest.raises(ConfigError, match=r"attention\.softcap"):
        one("attention=softcap", f"attention.softcap={cap}")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["attention.gain=shared"], "attention.gain"),
        (["attention.center=true"], "attention.center"),
        (["attention.axis=all"], "attention.axis"),
        (["attention.bias=true"], "attention.bias"),
        (["attention=l2", "attention.gain_offset=1"], "attention.gain_offset"),
        (["attention=rmsnorm", "attention.scale_init=3"], "attention.scale_init"),
        (["attention=softcap", "attention.backend=sdpa"], "attention.backend"),
        (["attention.backend=flex", "device=cpu"], "attention.backend"),
        (["data.classes=5"], "data.classes"),
        (["data=cifar10", "data.classes=5"], "data.classes"),
        (["data=imagefolder", "data.samples=100"], "data.samples"),
        (["data=fashion_mnist", "data.image_size=30", "model.patch=4"], "model.patch"),
        (["data.randaugment=2"], "data.randaugment"),
        (["data=cifar10", "data.randaugment_magnitude=5"], "data.randaugment_magnitude"),
        (["data=cifar10", "data.randaugment=2", "data.randaugment_magnitude=31"], "data.randaugment_magnitude"),
        (["data.label_noise=1"], "data.label_noise"),
        (["data.poison=nan"], "data.poison_steps"),
        (["data.poison_steps=[3]"], "data.poison_steps"),
        (["data.poison=nan", "data.poison_steps=[3,3]"], "data.poison_steps"),
        (["data.poison=nan", "data.poison_steps=[400]"], "data.poison_steps"),
        (["data.poison=nan", "data.poison_steps=[-1]"], "data.poison_steps"),
    ],
)
def test_combinations_without_meaning_are_refused_with_the_key(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        one(*overrides)
    assert error.value.key == named


def test_every_preset_of_every_group_composes_and_passes_the_checks() -> None:
    for group in ("model", "attention", "data", "optim", "precision", "probe", "tracker"):
        for name in options(group):
            extra = ["data=synthetic", "data.image_size=224"] if group == "model" and name != "vit_micro" else []
            extra = ["model.patch=4"] if name == "synthetic" else extra
            check(one(f"{group}={name}", *extra))


def test_presets_are_named_by_what_they_set() -> None:
    for name in ("none", "layernorm", "rmsnorm", "l2", "softcap", "layernorm_softcap", "rmsnorm_softcap", "l2_softcap"):
        assert variant(one(f"attention={name}").attention) == name
    for name, same in {"qwen3": "rmsnorm", "henry2020": "l2", "gemma3": "rmsnorm_gainoffset-1"}.items():
        assert variant(one(f"attention={name}").attention) == same
    assert variant(one("attention=rmsnorm", "attention.softcap=50").attention) == "rmsnorm_softcap"
    assert variant(one("attention=rmsnorm", "attention.axis=all").attention) == "rmsnorm_axis-all"
    assert variant(one("attention=softcap", "attention.softcap=30").attention) == "softcap30"


def test_identity_counts_values_and_not_how_they_were_written() -> None:
    assert identity(one("optim.lr=1e-3")) == identity(one("optim.lr=0.001")) == identity(one())
    assert identity(one("attention=rmsnorm", "attention.softcap=50")) == identity(one("attention=rmsnorm_softcap"))
    assert identity(one("seed=3", "model.seed=3")) == identity(one("seed=3"))
    assert identity(one("data.image_size=8")) == identity(one())


def test_identity_changes_with_every_identity_key_and_with_no_other() -> None:
    base = identity(one())
    for override in (
        "output_dir=/x",
        "sweep_name=s",
        "probe.every=7",
        "probe.queries=4",
        "probe.groups=[sink]",
        "tracker=none",
        "train.eval_every=5",
        "data.root=/x",
        "data.download=true",
        "data.workers=2",
    ):
        assert identity(one(override)) == base, override
    for override in ("seed=1", "model.seed=1", "data.seed=1", "precision=fp32", "optim.lr=2e-3", "train.clip_norm=1.0"):
        assert identity(one(override)) != base, override


def test_identity_of_data_is_what_it_holds_and_not_where_it_lies_unless_that_says_what_it_holds() -> None:
    fashion = ["data=fashion_mnist", "model.patch=7"]
    assert identity(one(*fashion, "data.root=/x")) == identity(one(*fashion))
    assert identity(one(*fashion, "data.image_size=28")) == identity(one(*fashion))
    folder = ["data=imagefolder", "model=vit_small"]
    assert identity(one(*folder, "data.root=/x")) != identity(one(*folder, "data.root=/y"))
    assert identity(one(*folder, "data.root=/x/")) == identity(one(*folder, "data.root=/x"))
    base = identity(one(*fashion))
    for changed in (
        ["data.crop=pad"],
        ["data.flip=true"],
        ["data.randaugment=1"],
        ["data.mixup=0.2"],
        ["data.label_noise=0.1"],
        ["data.poison=images", "data.poison_steps=[3]"],
    ):
        assert identity(one(*fashion, *changed)) != base, changed


def test_identity_of_a_default_run_is_pinned() -> None:
    # a change here makes every stored run a stranger: only a new schema version may do that
    assert identity_keys(one()) == {
        "model.width": 64,
        "model.depth": 4,
        "model.heads": 4,
        "model.patch": 2,
        "optim.warmup": 40,
    }
    assert run_name(one()) == "none-lr1e-03-seed0-cca89e"
    assert run_name(one("data=synthetic", "model.patch=4")) == "none-lr1e-03-seed0-51855e"


def test_run_names_hold_only_letters_digits_dash_and_underscore() -> None:
    for overrides in (["optim.lr=0.00123"], ["attention=softcap", "attention.softcap=12.5"], ["optim.lr=1e10"]):
        assert re.fullmatch(r"[a-z0-9_-]+", run_name(one(*overrides)))


def test_configuration_survives_plain_yaml() -> None:
    cfg = one("optim.lr=1e-5", "attention=l2_softcap", "experiment=vit22b")
    again = yaml.safe_load(yaml.safe_dump(as_dict(cfg)))
    assert again["optim"]["lr"] == 1e-5
    assert to_typed(again) == cfg


def test_a_stored_configuration_is_read_the_same_in_sections_and_as_a_whole() -> None:
    """Sections of runs are read once for all that have them equal; what follows another key shows where that fails."""
    for overrides in (["seed=3"], ["seed=3", "optim.lr=3e-2", "attention=l2"], ["seed=4", "model.seed=9"]):
        stored, lacking = as_dict(one(*overrides)), as_dict(one(*overrides))
        del lacking["model"]["seed"]
        typed = to_typed(stored)
        assert typed == to_typed(OmegaConf.create(stored)) == one(*overrides)
        assert to_typed(lacking).model.seed == typed.seed, "a key that is missing follows the run's seed"
        typed.data.poison_steps.append(7)
        typed.optim.lr = 1.0
        assert to_typed(stored) == one(*overrides), "what is shared inside is not shared outside"


@pytest.mark.parametrize("section", ["model", "optim", "tracker"])
def test_a_stored_configuration_with_a_wrong_type_is_refused_by_its_full_name(section: str) -> None:
    stored = as_dict(one())
    key = {"model": "width", "optim": "lr", "tracker": "mode"}[section]
    stored[section][key] = {"a": 1}
    with pytest.raises(OmegaConfBaseException, match=f"{section}.{key}"):
        to_typed(stored)


def test_every_key_says_what_it_is() -> None:
    for key in keys():
        assert key.meta["doc"].endswith("."), key.name


def test_experiment_axis_is_replaced_by_an_override() -> None:
    grid = compose_sweep(["experiment=vit22b", "optim.lr=1e-2", "seed=0,1"])
    assert len(grid.runs) == 5 * 2
    assert {cfg.optim.lr for _, cfg in grid.runs} == {0.01}
    assert {cfg.optim.warmup for _, cfg in grid.runs} == {1000}
    assert {cfg.attention.init for _, cfg in grid.runs} == {"match"}


def test_experiments_are_the_recipes_that_were_measured() -> None:
    ramp = compose_sweep(["experiment=vit22b"])
    grid = compose_sweep(["experiment=lr_grid"])
    assert (len(ramp.runs), len(grid.runs)) == (30, 60)
    assert {(c.train.steps, c.optim.warmup, c.train.clip_norm) for _, c in ramp.runs} == {(1000, 1000, None)}
    assert {(c.train.steps, c.optim.warmup, c.train.clip_norm) for _, c in grid.runs} == {(400, 40, 1.0)}
    assert {c.optim.schedule for _, c in grid.runs} == {"cosine"}
    assert not {c.seed for _, c in ramp.runs} & set(range(5)), "bounds were chosen on seeds 0-4"
    assert not {c.seed for _, c in grid.runs} & {10, 11, 12}, "bounds were chosen on seeds 10-12"


def test_shorter_ramp_stays_a_ramp() -> None:
    assert compose_sweep(["experiment=vit22b", "train.steps=50", "seed=0"]).runs[0][1].optim.warmup == 50


def test_several_values_are_refused_for_a_single_run() -> None:
    with pytest.raises(UserError, match="qkexp sweep"):
        one("seed=0,1")


def test_paths_are_absolute_from_the_launch_directory(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert compose_sweep(["output_dir=here"], single=True).directory == tmp_path / "here" / "single"
    assert one("data.root=here").data.root == str(tmp_path / "here")


def test_changes_to_a_run_set_what_they_name_and_nothing_else() -> None:
    base = one("attention=layernorm_softcap", "attention.init=match", "optim.lr=0.5")
    (texts, found), *others = compose_changes(base, ["attention=rmsnorm", "optim.warmup=3,4"])
    assert texts == ["attention=rmsnorm", "optim.warmup=3"]
    assert [cfg.optim.warmup for _, cfg in [([], found), *others]] == [3, 4]
    assert (found.attention.norm, found.attention.center, found.attention.softcap) == ("rms", False, None)
    assert (found.attention.init, found.optim.lr) == ("match", 0.5), "no file named them"
    assert compose_changes(base, ["attention=rmsnorm_softcap"])[0][1].attention.softcap == 50.0, "and what it builds on"
    assert base.attention.center, "the run's own is not touched"


@pytest.mark.parametrize("override", ["experiment=lr_grid", "nosuch=1", "attention=nosuch", "optim.lr=x", "+a=1"])
def test_changes_to_a_run_that_are_not_understood_are_refused(override: str) -> None:
    with pytest.raises(UserError):
        compose_changes(one(), [override])
