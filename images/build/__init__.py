"""Builds images from recipes: no root rights, no loop device, no mount, the same bytes each time."""

from images.build.builder import StepProgress, build, build_recipe

__all__ = ["StepProgress", "build", "build_recipe"]
