"""How it is trained: the loop and what it needs."""
