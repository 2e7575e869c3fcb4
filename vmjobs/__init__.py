"""Runs grid jobs in virtual machines and reports to the HTCondor schedd they came from."""

__version__ = "0.1.0"
