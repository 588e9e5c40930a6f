"""Training: parameter groups, run configuration, the loop on Accelerate, the Trainer callback."""
