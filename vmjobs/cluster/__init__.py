"""Virtual clusters: machines that stay, and join an HTCondor pool as workers of their own."""
