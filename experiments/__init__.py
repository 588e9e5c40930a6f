"""The paper's claims as experiments that can fail: `python -m experiments NAME`.

Each experiment is the module of its name (with `_` for `-`) and has an `EXPERIMENT`: a grid of settings, a function
that measures one run, and a conclusion from the rows of the table. A new one also needs an entry in
`runner.experiment.EXPERIMENTS`. `runner/` does the rest: `experiment.py` defines an experiment, `comparison.py` how
variants of a model are compared, `runner.py` runs them, `summary.py` turns runs into intervals and a verdict,
`report.py` writes RESULTS.md, `fit.py` is the training loop. `pages/` has measurements with a page of their own.
"""
