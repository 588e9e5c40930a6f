"""Finished runs with given values, for the tests of summaries and verdicts."""

from rsa_hf.experiments.runner.summary import Run


def finished(settings, values):
    return Run(settings, values, 1.0, "a machine", {})


def conclude(experiment, *runs):
    return experiment.conclude(experiment.summarise(runs))
