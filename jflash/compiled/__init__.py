"""The executables of every driver: what they are, their sizes, their names, files and tiles."""
