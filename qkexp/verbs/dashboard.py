"""The W&B workspace and report."""

from __future__ import annotations

import argparse
import json
import os

from qkexp.verbs.terminal import DONE, FAILED, err, out

HELP = "build the W&B workspace and report"
EXAMPLE = "qkexp dashboard --entity my-team --project qkexp"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--entity", required=True, help="W&B user or team")
    parser.add_argument("--project", default="qkexp", help="W&B project; default: qkexp")
    parser.add_argument("--print", action="store_true", help="print what would be saved, as JSON; needs no server")


def run(options: argparse.Namespace) -> int:
    from qkexp.analysis.dashboard import modules, save, specification
    from qkexp.config import UserError

    modules()
    if options.print:
        print(json.dumps(specification(options.entity, options.project), indent=1))
        return DONE
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    from qkexp.record.mirror.login import logged_in

    if not logged_in():
        raise UserError("no W&B login: run `wandb login`, or set WANDB_API_KEY; --print needs none")
    try:
        with out.status("saving the workspace and the report"):
            saved = save(options.entity, options.project)
    except UserError:
        raise
    except Exception as error:  # wandb's own errors have no common base
        err.print(f"not saved ({type(error).__name__}): {error}", markup=False, soft_wrap=True)
        err.print("a self-hosted server may not know saved views; --print shows what would be saved", soft_wrap=True)
        return FAILED
    for name, url, replaced in saved:
        out.print(f"{'updated' if replaced else 'made'}: {name}\n  {url}", markup=False, soft_wrap=True)
    return DONE
