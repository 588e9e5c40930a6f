"""Run experiments: training, storage of runs, intervals, verdicts, report."""
