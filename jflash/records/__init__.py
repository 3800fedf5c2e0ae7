"""What a model and a request are: frozen records, which `jflash.io` fills and the rest reads."""
