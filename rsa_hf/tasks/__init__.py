"""Tasks: defect detection and language modelling, their data, audits and scores."""
