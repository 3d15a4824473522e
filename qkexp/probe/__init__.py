"""What is measured: statistics of attention per layer and head."""
