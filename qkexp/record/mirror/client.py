"""wandb as the mirror uses it: quiet, with an end to every wait, and honest about what was refused."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from qkexp.record.mirror.kept import Kept

Mode = Literal["online", "offline"]
INIT_SECONDS = 20.0
FINISH_SECONDS = 60.0
DELETED = "previously created and deleted"  # W&B never gives out a deleted id again


class Refused(Exception):
    """The server will not take a run's rows: a quota, a missing right. wandb itself only warns of it."""


def new_id(text: str, attempt: int) -> str:
    """A W&B id that says what it belongs to; the random end, because a deleted id cannot be used again."""
    return f"{text}-{attempt}-{secrets.token_hex(3)}"


def open_run(mode: Mode, directory: Path, **identity: Any) -> Any:
    """Begin a W&B run, or go on in it. ``identity``: id, project, entity, name, group, config …

    Raises:
        wandb.errors.CommError: the server cannot be reached, or does not want this run.
    """
    import wandb

    target = wandb.init(
        **identity, dir=str(directory), mode=mode, resume="allow", reinit="create_new", settings=quiet_settings(mode)
    )
    # automatic summaries hold last values, by which a run that just began could sort as the best
    target.define_metric("*", summary="none")
    return target


def close_run(target: Any, exit_code: int) -> None:
    """End a W&B run and wait until everything has arrived.

    Raises:
        TimeoutError: it has not, in time.
        Refused: it never will.
    """
    target.finish(exit_code=exit_code)
    check(target)


def check(target: Any) -> None:
    """Raise where the server has refused this run's rows for good, which only wandb's own log tells."""
    log = Path(target.settings.log_internal or "")
    with contextlib.suppress(OSError):
        for line in log.read_text().splitlines():
            if '"level":"ERROR+' in line:  # what wandb calls fatal
                raise Refused(json.loads(line).get("msg", line))


def claim(directory: Path) -> int | None:
    """A descriptor that holds a directory while it is copied; None where another mirror does.

    Two launchers may share a sweep, and so two mirrors a run.
    """
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    except OSError:  # a file system without locks
        pass
    return held


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[bool]:
    """Whether the directory is ours for the while."""
    held = claim(directory)
    try:
        yield held is not None
    finally:
        if held is not None:
            os.close(held)


def server() -> str:
    """Where wandb sends runs."""
    import wandb

    return str(wandb.setup().settings.base_url)


def holds(record: Kept, mode: Mode) -> bool:
    """Whether what was copied then is where it is to be copied now: offline runs add nothing to any copy."""
    return mode == "offline" or (record.mode == "online" and record.server == server())


def folder(target: Any, directory: Path) -> str:
    """Where wandb keeps this run's own files, relative to the directory."""
    return str(Path(target.dir).parent.relative_to(directory.absolute()))


def artifact(name: str, kind: str, files: dict[str, Path]) -> Any:
    """Files as an artifact: read where they lie, copied neither to a staging folder nor to wandb's cache."""
    import wandb

    made = wandb.Artifact("".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:128], type=kind)
    for inside, path in files.items():
        made.add_file(str(path), name=inside, policy="immutable", skip_cache=True)
    return made


def quiet_settings(mode: Mode) -> Any:
    """wandb without console capture, system statistics, git, code and machine facts: each costs time."""
    import wandb

    wanted: dict[str, Any] = {
        "silent": True,
        "console": "off",
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "symlink": False,
        "init_timeout": INIT_SECONDS,
        "finish_timeout": FINISH_SECONDS,
        "finish_timeout_raises": True,
        "x_disable_stats": True,
        "x_disable_meta": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "x_skip_transaction_log": mode == "online",  # the directory has it all
    }
    return wandb.Settings(**{k: v for k, v in wanted.items() if k in wandb.Settings.model_fields})
