"""The command lines: options, defaults and contradictions. They import nothing that is slow."""
