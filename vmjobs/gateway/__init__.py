"""A grid gateway: the servers of a small site as VMs of one host, on a private network."""
