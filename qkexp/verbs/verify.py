"""The claims of an experiment against its runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from qkexp.verbs.terminal import DONE, FAILED, directory_of, out, takes_directory

HELP = "check an experiment's claims"
EXAMPLE = "qkexp verify outputs/vit22b"


def arguments(parser: argparse.ArgumentParser) -> None:
    takes_directory(parser)


def run(options: argparse.Namespace) -> int:
    return verify_claims(directory_of(options.directory))


def verify_claims(directory: Path) -> int:
    from qkexp.analysis.claims import table, verify_sweep

    results = verify_sweep(directory)
    if not results:
        out.print(f"{directory}: no claims to verify", soft_wrap=True)
        return DONE
    out.print(table(results))
    failed = [r for r in results if r.verdict == "fail"]
    out.print(f"{len(results)} claims: {sum(r.verdict == 'pass' for r in results)} passed, {len(failed)} failed")
    return FAILED if failed else DONE
