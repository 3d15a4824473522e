"""Copies run directories to Weights & Biases, from a process of its own; training never imports wandb.

``process`` is the mirror's process and the handle by which its parent holds it, ``login`` whether there is somebody
to copy for, ``run`` one run directory and its W&B run, ``sweep`` the run that holds what belongs to all of them,
``client`` wandb itself as both need it; ``rows``, ``maps`` and ``facts`` are what is sent.
"""
