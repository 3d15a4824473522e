"""What scripts/bench.py measures, section by section."""
