"""What it means: claims, sensitivity, figures. Reads run directories and nothing else."""
