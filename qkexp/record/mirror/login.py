"""Whether there is a login for wandb; asks neither the user nor the network."""

from __future__ import annotations

import contextlib
import netrc
import os
from urllib.parse import urlsplit

from qkexp.record.mirror.client import Mode


def resolve_mode(mode: str) -> Mode | None:
    """auto -> ``WANDB_MODE``, else online where there is a login, else offline. None: disabled.

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
