"""What is trained: ViTs whose variants differ only inside attention."""
