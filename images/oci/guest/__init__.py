"""What container images get besides the guest program: how a job runs in one."""
