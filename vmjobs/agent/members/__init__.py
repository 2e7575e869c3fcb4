"""A node's share of the machines of virtual clusters, and what keeps them alive."""
