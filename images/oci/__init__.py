"""Make VM images from container images: fetch, merge layers in memory, write a root disk."""
