"""An engine of another process: what goes through a pipe, and both its ends."""
