"""Runs the cluster VMs that the service assigns to this node."""
