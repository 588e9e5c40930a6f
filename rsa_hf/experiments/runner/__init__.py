"""The runner of experiments: runs, tables, intervals, pages."""
