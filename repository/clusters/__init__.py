"""Virtual clusters: what is declared, what is there, and the step that brings one to the other.

Images ask this package's tables which of them clusters need, so nothing is imported here.
"""
