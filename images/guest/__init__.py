"""The guest program: POSIX shell, in an image /sbin/vmjobs-init and its parts, and `talk`, of C."""
