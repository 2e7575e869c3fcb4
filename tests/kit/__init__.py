"""Helpers that tests share, and the programs that tests start."""

from pathlib import Path

#: The project's folder, and the folder of this package.
ROOT, KIT = Path(__file__).parents[2], Path(__file__).parent
