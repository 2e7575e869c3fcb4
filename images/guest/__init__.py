"""The guest-side program: POSIX shell, installed in an image as /sbin/vmjobs-init and its parts."""
