"""What the paper proves, as things to run."""
