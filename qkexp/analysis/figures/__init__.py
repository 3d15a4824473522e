"""One file per figure; each reads a sweep directory."""
