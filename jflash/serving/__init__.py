"""Requests that arrive at any time, through one device: an engine and what stands above it.

An `engine` takes a `request` and gives a `handle`. Its thread (`thread`) calls programs (`calls`)
over pages (`paging`); an engine of another process is reached through a pipe (`pipe`).
"""
