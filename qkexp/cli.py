"""The command line: finds the verb, hears its arguments, and turns errors into words and exit codes.

Flags start with ``--``; everything else is a Hydra override. Exit codes: 0 done (a run that diverged
is a result), 1 a run crashed or a claim failed, 2 wrong input, 75 interrupted: run it again.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import signal
import sys
from collections.abc import Sequence
from typing import Any

from qkexp.config import UserError
from qkexp.verbs import VERBS, load
from qkexp.verbs.terminal import DONE, FAILED, INTERRUPTED, WRONG_INPUT, err


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
    atexit.register(gc.freeze)  # else Python ends by searching all of torch and pandas for garbage, for a second
    try:
        return load(args[0]).run(parser(args[0]).parse_intermixed_args(args[1:]))
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


def usage() -> str:
    """What ``qkexp --help`` prints: every verb with an example."""
    lines = ["usage: qkexp VERB [--flags] [OVERRIDES]", ""]
    for name in VERBS:
        verb = load(name)
        lines.append(f"  {name:<10} {verb.HELP}\n             {verb.EXAMPLE}")
    lines += [
        "",
        "Everything that is not a flag is a Hydra override: GROUP=FILE or GROUP.KEY=VALUE.",
        "Quote values that hold = , or brackets: 'KEY=\"a=b\"'. `qkexp VERB --help` tells more.",
    ]
    return "\n".join(lines)


def parser(name: str) -> argparse.ArgumentParser:
    """The argument parser of a verb."""
    verb = load(name)
    found = argparse.ArgumentParser(
        prog=f"qkexp {name}",
        description=verb.HELP,
        epilog=f"example: {verb.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.arguments(found)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
