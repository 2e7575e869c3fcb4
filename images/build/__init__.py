"""Build images from recipes: without root, loop devices or mounts, and reproducibly."""

from images.build.builder import StepProgress, build, build_recipe

__all__ = ["StepProgress", "build", "build_recipe"]
