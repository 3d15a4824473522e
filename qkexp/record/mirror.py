"""Copies run directories to Weights & Biases, from a process of its own: ``python -m qkexp.record.mirror``.

Training never imports wandb: a dead server, a full disk or a slow upload touch this process only. It
looks at the directories every few seconds. The directory is the truth: ``mirror.json`` in it keeps the
W&B id, and a later call (``qkexp sync DIR``) goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import netrc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from qkexp.record.load import read_json
from qkexp.record.mirror_run import Copy, Mode

POLL_SECONDS = 5.0  # rarely: each look costs CPU time next to training
RETRY_SECONDS = 60.0  # after a failure, or while the server cannot be reached
ORPHAN_SECONDS = 120.0  # what a mirror without a parent may still take
log = logging.getLogger("qkexp.mirror")


# ---------------------------------------------------------------- the parent's side


@dataclass
class Mirror:
    """A mirror process, seen from the process that started it."""

    process: subprocess.Popen[bytes]
    directory: Path
    names: tuple[str, ...]

    def close(self, timeout: float | None) -> str | None:
        """Say that all runs ended and wait for the rest to be copied; returns a warning where it was not."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it may be dead
            self.process.stdin.write(b"\n")  # a fork may hold the pipe open, so the end is said as well
            self.process.stdin.close()
        try:
            if self.process.wait(timeout) == 0:
                return None
            why = "the mirror failed"
        except subprocess.TimeoutExpired:
            self.process.kill()  # wandb's own service ends with it
            self.process.wait()
            why = f"not done after {timeout:.0f} s"
        begun = [name for name in self.names if (self.directory / name / "config.yaml").exists()]
        left = sum((read_json(self.directory / name / "mirror.json") or {}).get("status") is None for name in begun)
        where = f"see {self.directory / 'mirror.log'}"
        return f"W&B: {left} of {len(begun)} runs not copied ({why}; {where}); later: qkexp sync {self.directory}"


def start(directory: Path, names: Sequence[str], project: str, mode: str, group: str) -> Mirror:
    """Start mirroring the runs ``names`` of a directory; they need not exist yet.

    Args:
        directory: the sweep's.
        names: run directories in it.
        project: W&B project.
        mode: online, offline, or auto (what ``WANDB_MODE`` says, else online where there is a login).
        group: W&B group of the runs.
    """
    command = [sys.executable, "-m", "qkexp.record.mirror", str(directory), *names]
    command += ["--project", project, "--mode", mode, "--group", group]
    # one thread each: it shares the machine with training (wandb's service is written in Go)
    env = {"WANDB_ERROR_REPORTING": "false", **os.environ, "OMP_NUM_THREADS": "1", "GOMAXPROCS": "1"}
    with (directory / "mirror.log").open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,  # Ctrl-C is for the runs: their last rows are still to be copied
        )
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: no priorities on Windows
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    return Mirror(process, directory, tuple(names))


# ---------------------------------------------------------------- the child's side


def resolve_mode(mode: str) -> Mode | None:
    """auto -> ``WANDB_MODE``, else online where there is a login, else offline. None: disabled.

    Neither asks the user nor the network.

    Raises:
        ValueError: online, but there is no login.
    """
    chosen = os.environ.get("WANDB_MODE", "") if mode == "auto" else mode
    if chosen == "disabled":
        return None
    if chosen not in ("offline", "dryrun") and logged_in():
        return "online"
    if chosen in ("online", "run"):
        raise ValueError("no W&B login: run `wandb login`, or set WANDB_API_KEY")
    return "offline"


def logged_in() -> bool:
    """Whether wandb will find a key: in the environment, in its settings or in the netrc file."""
    import wandb

    settings = wandb.setup().settings
    if settings.api_key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = [urlsplit(settings.base_url).netloc]
    if settings.base_url == wandb.Settings.model_fields["base_url"].default:
        hosts.append("api.wandb.ai")  # W&B's own server has had several names
    for path in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if any(map(netrc.netrc(os.path.expanduser(path)).authenticators, hosts)):
                return True
    return False


def serve(copies: Sequence[Copy], ended: threading.Event) -> int:
    """Poll until ``ended`` or orphaned, then copy the rest. Returns 0, or 1 where a run was not copied."""
    parent, wait = os.getppid(), POLL_SECONDS
    while not ended.wait(wait) and os.getppid() == parent:
        wait = POLL_SECONDS if poll(copies, final=False) else RETRY_SECONDS
    threading.Thread(target=_end_orphan, args=(parent,), daemon=True).start()
    reached = poll(copies, final=True)
    failed = [copy for copy in copies if copy.error]
    for copy in failed:
        log.error("%s is not copied: %s", copy.directory.name, copy.error)
    return int(not reached or bool(failed))


def poll(copies: Sequence[Copy], final: bool) -> bool:
    """Advance every run; one that fails does not stop the others. False: the server cannot be reached."""
    import wandb

    for copy in copies:
        early = copy.mode == "offline" and not copy.ended()  # nobody watches it grow; a look costs CPU time
        if not final and (early or time.monotonic() < copy.retry_at):
            continue
        try:
            copy.advance(final)
            copy.error = None
        except Exception as error:
            copy.error = f"{type(error).__name__}: {error}"
            copy.retry_at = time.monotonic() + RETRY_SECONDS
            if isinstance(error, wandb.errors.CommError):
                log.error("%s: %s", copy.directory.name, error)
                return False
            log.exception("%s", copy.directory.name)
    return True


def _await_end(ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        os.read(0, 1)  # a byte, or the end of the pipe: the parent closed it or died
    ended.set()


def _end_orphan(parent: int) -> None:
    """Nobody would end an orphan whose server never answers."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """The mirror process: ends when its standard input ends and everything is copied."""
    parser = argparse.ArgumentParser(prog="python -m qkexp.record.mirror", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="of the sweep")
    parser.add_argument("names", nargs="*", help="run directories in it")
    parser.add_argument("--project", default="qkexp", help="W&B project")
    parser.add_argument("--mode", default="auto", choices=("auto", "online", "offline"))
    parser.add_argument("--group", default=None, help="W&B group; the directory's name by default")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ended = threading.Event()
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    try:
        mode = resolve_mode(args.mode)
    except ValueError as error:
        log.error("%s", error)
        return 1
    log.info("%d runs of %s, %s", len(args.names), args.directory, mode or "disabled by WANDB_MODE")
    if mode is None:
        return 0
    group = args.group or args.directory.resolve().name
    return serve([Copy(args.directory / name, args.project, mode, group) for name in args.names], ended)


if __name__ == "__main__":
    sys.exit(main())
