"""Virtual clusters: long-lived VMs that join an HTCondor pool as worker nodes."""
