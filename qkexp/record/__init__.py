"""What is kept: run directories, written, read and mirrored."""
