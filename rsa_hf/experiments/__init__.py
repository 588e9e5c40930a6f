"""The paper's claims as experiments that can fail: `rsa-hf reproduce NAME`.

`runner/` runs them: `experiment.py` defines an experiment, `runner.py` runs it, `summary.py` and `conclusion.py` turn
runs into intervals and a verdict, `report.py` writes RESULTS.md, `fit.py` is the training loop. Each experiment is the
module of its name (with `_` for `-`) and has an `EXPERIMENT`. `theory/` holds the mathematics behind three of them.
"""
