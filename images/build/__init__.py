"""Build images from recipes: without root, loop devices or mounts, and reproducibly."""
