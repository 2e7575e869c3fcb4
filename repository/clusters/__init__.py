"""Virtual clusters: their wanted state, their actual state, and the reconciler.

``repository.images`` imports this package's tables, so nothing is imported here.
"""
