"""The OpenAI-compatible server: HTTP, JSON and text over an engine that knows token ids only."""
