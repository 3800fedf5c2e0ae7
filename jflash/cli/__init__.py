"""The commands behind scripts/: parse, print and read the clock; everything else is below."""
