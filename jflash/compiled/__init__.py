"""The executables of every driver: what they are, their names, their files, their tiles."""
