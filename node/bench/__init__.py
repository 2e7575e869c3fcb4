"""``vmjobs bench``: the same programs in VMs and on the host itself, one after the other."""
