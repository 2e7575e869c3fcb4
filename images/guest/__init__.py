"""The guest program: /sbin/vmjobs-init and its parts (POSIX shell), and programs in C."""
