"""Build images from recipes: without root, loop devices or mounts, and reproducibly."""

from images.build.builder import StepProgress, build

__all__ = ["StepProgress", "build"]
