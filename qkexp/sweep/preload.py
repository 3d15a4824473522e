"""What every run needs (torch, timm, the loop), imported once by the server that runs fork from."""

import sys

_hidden = "wandb" not in sys.modules
if _hidden:  # timm.utils imports wandb where it is installed, which patches the console: None makes that fail
    sys.modules["wandb"] = None  # type: ignore[assignment]

import qkexp.train.loop  # noqa: E402, F401

if _hidden:
    del sys.modules["wandb"]
