"""The commands of `jflash` and scripts/: they parse, print and read the clock."""
