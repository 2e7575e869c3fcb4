"""Additions to the guest program for container images."""
