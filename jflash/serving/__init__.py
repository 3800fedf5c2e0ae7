"""Requests that arrive at any time, through one device: an engine and what stands above it."""
