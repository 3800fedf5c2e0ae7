"""The process and its machine: settings of JAX, files and locks, hosts, replicas."""
