"""The command line: one short function per verb.

Flags start with ``--``; everything else is a Hydra override. Exit codes: 0 done (a run that diverged
is a result), 1 a run crashed or a claim failed, 2 wrong input, 75 interrupted: run it again.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qkexp.config import RunConfig, UserError

if TYPE_CHECKING:
    from qkexp.sweep.bisect import Verdicts
    from qkexp.sweep.launch import Launcher
    from qkexp.sweep.plan import Plan, Planned
    from qkexp.sweep.status import State

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 75
STOP = -1  # a search that only plans
MIRROR_SECONDS = 60.0
WATCH_SECONDS = 2.0
out = Console(soft_wrap=False, highlight=False)
err = Console(stderr=True, highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return DONE if args else WRONG_INPUT
    if args[0] not in VERBS:
        err.print(f"qkexp: {args[0]!r} is not a verb; accepted: {', '.join(VERBS)}", markup=False)
        return WRONG_INPUT
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # the last two: what clusters send before the end
        signal.signal(number, _interrupt)
    try:
        options = parser(args[0]).parse_intermixed_args(args[1:])
        return VERBS[args[0]][0](options)
    except UserError as error:
        err.print(f"qkexp {args[0]}: {error}", markup=False, soft_wrap=True)
        return WRONG_INPUT
    except (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        if error.filename is None:
            raise
        err.print(f"qkexp {args[0]}: {error.strerror}: {error.filename}", markup=False, soft_wrap=True)
        return WRONG_INPUT
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        err.print(f"qkexp {args[0]}: no space left on the device: free some, and the same command goes on")
        return FAILED
    except KeyboardInterrupt:
        err.print("interrupted; the same command goes on")
        return INTERRUPTED


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# ---------------------------------------------------------------- verbs


def train(options: argparse.Namespace) -> int:
    if options.multirun:
        return sweep(options)
    plan = _plan(options.overrides, single=True)
    if options.plan:
        return _print_plan(plan, options)
    run = plan.runs[0]
    if not plan.missing(options.again):
        _adopt(plan, options)
    else:
        code = _launch(plan, plan.runs, _ready(plan, plan.runs, alone=True), options, alone=True)
        if code:
            _explain_failure(plan.directory / run.name)
            return code
    _print_outcome(plan.directory / run.name)
    return DONE


def sweep(options: argparse.Namespace) -> int:
    return _sweep(_plan(options.overrides), options)


def reproduce(options: argparse.Namespace) -> int:
    overrides = list(options.overrides)
    name = overrides.pop(0) if overrides and "=" not in overrides[0] else "vit22b"
    plan = _plan([f"experiment={name}", *overrides])
    if options.quick:
        seed = min(run.config.seed for run in plan.runs)
        plan = _plan([f"experiment={name}", *(o for o in overrides if not o.startswith("seed=")), f"seed={seed}"])
    code = _sweep(plan, options)
    if options.plan or code in (WRONG_INPUT, INTERRUPTED):
        return code
    code = max(code, _verify(plan.directory))
    _draw(plan.directory)
    return code


def status(options: argparse.Namespace) -> int:
    from rich.console import Group
    from rich.live import Live

    from qkexp.sweep.status import pace, summary, sweep_states, table

    directory = _directory(options.directory)

    def looks() -> Iterator[list[State]]:
        states = sweep_states(directory)
        yield states
        while options.watch and any(s.status in ("running", "missing") for s in states):
            time.sleep(WATCH_SECONDS)
            states = sweep_states(directory, {s.name: s for s in states})
            yield states

    with contextlib.suppress(KeyboardInterrupt):  # of a user who has seen enough
        if options.json:
            for states in looks():
                print(json.dumps([vars(s) for s in states], indent=None if options.watch else 1), flush=True)
        else:
            with Live(console=out, auto_refresh=False) as live:
                for states in looks():
                    line = ", ".join(filter(None, (summary(states), pace(states))))
                    live.update(Group(table(states, str(directory)), line), refresh=True)
    return DONE


def verify(options: argparse.Namespace) -> int:
    return _verify(_directory(options.directory))


def figures(options: argparse.Namespace) -> int:
    _draw(_directory(options.directory), options.names or None)
    return DONE


def sync(options: argparse.Namespace) -> int:
    from qkexp.record.load import load_sweep
    from qkexp.record.mirror import start

    directory = _directory(options.directory)
    runs = load_sweep(directory).all
    tracker = next(iter(runs.values())).typed.tracker
    mirror = start(directory, list(runs), tracker.project, options.mode, group=directory.resolve().name)
    with out.status(f"copying {len(runs)} runs to W&B"):
        warning = mirror.close(None)
    if warning:
        err.print(warning, markup=False, soft_wrap=True)
        return FAILED
    out.print(f"{directory}: {len(runs)} runs are on W&B, or as offline runs in their directories", soft_wrap=True)
    return DONE


def data(options: argparse.Namespace) -> int:
    other = [o for o in options.overrides if o.split("=")[0] in ("data", "data.name")]
    if other:
        raise UserError(f"{other[0]}: the data set is {options.name}, as named before it")
    plan = _plan([f"data={options.name}", *options.overrides], single=True)
    from qkexp.train.data import convert

    out.print(f"{options.name}: {convert(plan.runs[0].config.data)}", soft_wrap=True, markup=False)
    return DONE


def probe(options: argparse.Namespace) -> int:
    from qkexp.analysis import snapshot
    from qkexp.probe.check import CoverageError

    if options.batch < 1:
        raise UserError(f"--batch={options.batch}: at least 1")
    with out.status(f"probing {options.model}"):
        subject = snapshot.subject(options.model, options.weights, options.images, options.batch)
        try:
            frame, coverage = snapshot.take(subject, options.groups)
        except CoverageError as error:
            raise UserError(f"{options.model}: {error}") from None
        picture = snapshot.files(frame, subject, options.output / subject.name)
    out.print(snapshot.table(frame))
    for text in (f"{subject.name}: {subject.weights}; {subject.pictures}; {subject.precision}", str(coverage)):
        out.print(text, soft_wrap=True, markup=False)
    out.print(f"all heads and metrics: {picture.with_suffix('.csv')}\nmap: {picture}", soft_wrap=True)
    return DONE


# ---------------------------------------------------------------- what verbs share


def _plan(overrides: Sequence[str], *, single: bool = False) -> Plan:
    from qkexp.compose import compose_sweep

    with out.status("composing the runs"):
        composed = compose_sweep(overrides, single=single)
    from qkexp.sweep.plan import Plan

    return Plan.of(composed)


def _sweep(plan: Plan, options: argparse.Namespace) -> int:
    if plan.sweep.rates is not None:
        return _search(plan, options)
    return _print_plan(plan, options) if options.plan else _train(plan, options)


def _train(plan: Plan, options: argparse.Namespace) -> int:
    """Train what is missing of a plan, and say how all of it stands."""
    from qkexp.sweep.status import summary, table

    todo = plan.missing(options.again)
    launcher = _ready(plan, todo, alone=False)
    plan.write()
    done = len(plan.runs) - len(todo)
    out.print(f"{plan.directory}: {len(plan.runs)} runs, {done} finished before, {len(todo)} to train", soft_wrap=True)
    _adopt(plan, options)
    foreign = [] if options.again else plan.foreign()
    if foreign:
        out.print(f"kept, though other code made them (--again trains them anew): {_some(foreign)}", soft_wrap=True)
    code = _launch(plan, todo, launcher, options, alone=False) if todo else DONE
    states = plan.states()
    problems = [s for s in states if s.status not in ("completed", "diverged")]
    listed = states if len(states) <= 12 else problems  # of many runs, those that need a look
    if todo and listed:
        out.print(table(listed, "runs"))
    out.print(f"{plan.directory}: {summary(states)}", soft_wrap=True)
    return code


def _adopt(plan: Plan, options: argparse.Namespace) -> None:
    """Take over what other sweeps have finished, and name it."""
    plan.make_directory()
    shared = plan.adopt(options.again)
    if shared:
        sweeps = sorted({run.directory.parent.name for run in shared})
        names = _some([run.name for run in shared])
        out.print(f"shared with {', '.join(sweeps)} (--again trains them anew): {names}", soft_wrap=True)


def _search(plan: Plan, options: argparse.Namespace) -> int:
    """Bisect for the largest stable rate of each variant."""
    from qkexp.record.files import write_json
    from qkexp.sweep.bisect import report, search, table

    assert plan.sweep.rates is not None
    rates = plan.sweep.rates
    out.print(
        f"{plan.directory}: searching {len(rates)} rates from {rates[0]:g} to {rates[-1]:g}; all of them would be "
        f"{len(plan.runs)} runs",
        soft_wrap=True,
    )

    def train(part: Plan) -> int:
        if not options.plan:
            return _train(part, options)
        if part.missing():
            return _print_plan(part, options, "the next round") or STOP
        return DONE

    def judge(names: Sequence[str]) -> Verdicts:
        from qkexp.analysis.sensitivity import verdicts

        return verdicts(plan.directory, names)

    code, brackets = search(plan, train, judge)
    if code == STOP:
        return DONE
    if brackets:
        out.print(table(brackets))
        if not options.plan:
            write_json(plan.directory / "critical.json", report(brackets))
    return code


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ready(plan: Plan, todo: Sequence[Planned], *, alone: bool) -> Launcher:
    """Check what only this machine can tell (device, sizes, data), before anything is written.

    Returns the launcher that is to train the runs.
    """
    if todo and plan.sweep.launcher_name == "local":
        from qkexp.sweep.warm import warm_up

        warm_up()
    from qkexp.model.vit import check_sizes
    from qkexp.sweep.launch import cores
    from qkexp.sweep.launchers import make_launcher
    from qkexp.train.data import prepare
    from qkexp.train.precision import check_machine, warnings

    settings = dict(plan.sweep.launcher)
    if alone:
        settings |= {"workers": 1, "threads": settings["threads"] or cores()}
    launcher = make_launcher(plan.sweep.launcher_name, settings)
    if launcher.where == "here":
        for run in todo:
            check_machine(run.config)
        for text in {w: None for run in todo for w in warnings(run.config)}:
            err.print(text, markup=False, soft_wrap=True)
    for config in {str((r.config.model, r.config.data, r.config.attention)): r.config for r in todo}.values():
        check_sizes(config)
    needs: dict[tuple[Any, ...], RunConfig] = {}  # of each data set the run with the largest batch
    for config in sorted((run.config for run in todo), key=lambda c: c.train.batch_size):
        needs[config.data.name, config.data.root, config.data.download] = config
    for config in needs.values():
        prepare(config.data, config.train.batch_size)
    return launcher


def _launch(
    plan: Plan, todo: Sequence[Planned], launcher: Launcher, options: argparse.Namespace, *, alone: bool
) -> int:
    """Train runs, show progress, and mirror them where a tracker is configured."""
    from qkexp.record.files import write_json
    from qkexp.sweep.display import progress

    plan.make_directory()
    tracker = todo[0].config.tracker
    mirror = None
    if tracker.name == "wandb":
        from qkexp.record.mirror import start

        names = [run.name for run in todo]
        mirror = start(plan.directory, names, tracker.project, tracker.mode, group=plan.sweep.name)
    began = time.monotonic()
    try:
        with progress(out, plan.directory, todo) as tick:
            code = launcher.launch(plan.directory, todo, again=options.again, fail_fast=options.fail_fast, tick=tick)
        for problem in launcher.problems:
            err.print(f"{launcher.where}: {problem}", markup=False, soft_wrap=True)
        if not alone:
            timing = {
                "wall_seconds": time.monotonic() - began,
                "workers": launcher.workers,
                "trained": [r.name for r in todo],
            }
            write_json(plan.directory / "timing.json", timing)
    finally:
        if mirror is not None:
            with out.status("copying the last rows to W&B"):
                warning = mirror.close(MIRROR_SECONDS)
            if warning:
                err.print(warning, markup=False, soft_wrap=True)
    return code


def _verify(directory: Path) -> int:
    from qkexp.analysis.claims import table, verify_sweep

    results = verify_sweep(directory)
    if not results:
        out.print(f"{directory}: no claims to verify", soft_wrap=True)
        return DONE
    out.print(table(results))
    failed = [r for r in results if r.verdict == "fail"]
    out.print(f"{len(results)} claims: {sum(r.verdict == 'pass' for r in results)} passed, {len(failed)} failed")
    return FAILED if failed else DONE


def _draw(directory: Path, names: list[str] | None = None) -> None:
    from qkexp.analysis.figures import draw

    with out.status("drawing figures"):
        paths = draw(directory, names)
    for path in paths:
        out.print(f"figure: {path}", soft_wrap=True)


def _print_plan(plan: Plan, options: argparse.Namespace, title: str = "plan") -> int:
    from qkexp.sweep.estimate import estimate
    from qkexp.sweep.status import summary, table

    states = plan.states()
    out.print(table(states, f"{title} of {plan.directory}"))
    todo = plan.missing(options.again)
    named = len(plan.sweep.runs)
    twice = f" ({named} named by the grid)" if title == "plan" and named > len(plan.runs) else ""
    out.print(f"{len(plan.runs)} runs{twice}: {summary(states)}; {len(todo)} to train")
    if todo:
        with out.status("estimating the time"):
            text = estimate(todo, states, plan.sweep)
        out.print(text, soft_wrap=True)
    return DONE


def _print_outcome(directory: Path) -> None:
    from qkexp.record.load import load_run

    run = load_run(directory)
    outcome = run.outcome or {}
    for label, group in (run.provenance.get("parameter_groups") or {}).items():
        line = f"{label.replace('_', ' ')}: {group['tensors']} tensors, {group['parameters']:,} parameters"
        out.print(line, markup=False)
    out.print(f"{outcome.get('status')}: {outcome.get('reason')}", markup=False)
    for name, value in (outcome.get("final") or {}).items():
        out.print(f"  {name}: {'-' if value is None else f'{value:.4g}'}")
    out.print(f"{directory}", soft_wrap=True)


def _explain_failure(directory: Path) -> None:
    from qkexp.sweep.status import state_of

    state = state_of(directory)
    err.print(f"{state.status}: {state.reason}\nlog: {directory / 'log.txt'}", markup=False, soft_wrap=True)


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise UserError(f"{text}: no such directory")
    return path


# ---------------------------------------------------------------- help

Verb = tuple[Callable[[argparse.Namespace], int], str, str]
VERBS: dict[str, Verb] = {
    "reproduce": (reproduce, "sweep an experiment, verify its claims, draw its figures", "qkexp reproduce --quick"),
    "train": (train, "train one run", "qkexp train attention=rmsnorm optim.lr=3e-2"),
    "sweep": (
        sweep,
        "train many runs (Hydra multirun syntax)",
        "qkexp sweep attention=none,l2 optim.lr=1e-2,3e-2 seed=0,1,2",
    ),
    "status": (status, "how every run of a directory stands", "qkexp status outputs/vit22b --watch"),
    "verify": (verify, "check an experiment's claims", "qkexp verify outputs/vit22b"),
    "figures": (figures, "draw PDF, PNG and CSV", "qkexp figures outputs/vit22b heatmaps"),
    "sync": (sync, "copy runs to W&B that are not there yet", "qkexp sync outputs/vit22b --mode online"),
    "probe": (probe, "one frame of a timm model, or of a checkpoint of a run", "qkexp probe vit_small_patch16_224"),
    "data": (data, "fetch and convert a data set once", "qkexp data prepare fashion_mnist data.root=data"),
}


def usage() -> str:
    lines = ["usage: qkexp VERB [--flags] [OVERRIDES]", ""]
    lines += [f"  {name:<10} {text}\n             {example}" for name, (_, text, example) in VERBS.items()]
    lines += [
        "",
        "Everything that is not a flag is a Hydra override: GROUP=FILE or GROUP.KEY=VALUE.",
        "Quote values that hold = , or brackets: 'KEY=\"a=b\"'. `qkexp VERB --help` tells more.",
    ]
    return "\n".join(lines)


def parser(verb: str) -> argparse.ArgumentParser:
    """The argument parser of a verb."""
    _, text, example = VERBS[verb]
    p = argparse.ArgumentParser(
        prog=f"qkexp {verb}",
        description=text,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if verb in ("status", "verify", "figures", "sync"):
        p.add_argument("directory", help="a sweep directory, such as outputs/vit22b")
    if verb == "figures":
        p.add_argument("names", nargs="*", help="figures to draw; those of the experiment by default")
    if verb == "sync":
        p.add_argument(
            "--mode", choices=("auto", "online", "offline"), default="auto", help="auto: online with a login"
        )
    if verb == "status":
        p.add_argument("--watch", action="store_true", help="again every two seconds, until every run has ended")
        p.add_argument("--json", action="store_true", help="machine-readable")
    if verb == "probe":
        from qkexp.probe.metrics import GROUPS

        p.add_argument("model", metavar="MODEL", help="a timm model's name, a run directory or a checkpoint in one")
        p.add_argument(
            "--weights",
            default="random",
            metavar="random|pretrained|FILE",
            help="of a timm model; pretrained: from timm's hub or your cache of it, random where they cannot be had",
        )
        p.add_argument(
            "--images",
            type=Path,
            metavar="DIR",
            help="images; else those of the run's validation, or noise",
        )
        p.add_argument("--batch", type=int, default=8, help="how many images (8)")
        untrained = [group for group in GROUPS if group not in ("gradients", "update", "adam")]
        p.add_argument("--groups", nargs="+", default=(), choices=untrained, help="further metrics (docs/metrics.md)")
        p.add_argument("--output", type=Path, default=Path("outputs/probe"), metavar="DIR", help="(outputs/probe)")
    if verb == "data":
        from qkexp.compose import options

        p.add_argument("action", choices=("prepare",), help="fetch where it is not found on disk, convert, check")
        p.add_argument("name", metavar="NAME", help=" | ".join(options("data")))
        p.add_argument(
            "overrides", nargs="*", metavar="OVERRIDE", help="data.root=DIR: where to; else the user's cache"
        )
    if verb in ("train", "sweep", "reproduce"):
        p.add_argument("--again", action="store_true", help="train finished runs again")
        p.add_argument("--fail-fast", action="store_true", help="stop at the first run that crashes")
        p.add_argument("--plan", action="store_true", help="print the runs and start nothing")
        p.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=_overrides_help())
    if verb == "train":
        p.add_argument("-m", "--multirun", action="store_true", help="the same as qkexp sweep")
    if verb == "reproduce":
        p.add_argument("--quick", action="store_true", help="one seed")
    return p


def _overrides_help() -> str:
    from qkexp.compose import options

    return (
        "GROUP=FILE or GROUP.KEY=VALUE; experiments: "
        + ", ".join(options("experiment"))
        + "; attention: "
        + ", ".join(options("attention"))
    )


if __name__ == "__main__":
    raise SystemExit(main())
