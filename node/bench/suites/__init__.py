"""Suites of ``vmjobs bench``: for each a description and its script, and what papers published."""
