"""The paper's claims as experiments that can fail: `rsa-hf reproduce NAME`.

`experiment.py` says what an experiment is, `summary.py` what its intervals are, `runner.py` runs one, `page.py`
writes RESULTS.md; each experiment is the module of its name, with `-` as `_`, that has an `EXPERIMENT`.
"""
