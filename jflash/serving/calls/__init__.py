"""The engine's executables, what goes into a call and what comes out of it."""
