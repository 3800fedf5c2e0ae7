"""One module a family of models: what its config.json says, and what its tensors are called.

A family of targets has the ARCHITECTURE and MODEL_TYPE of its config.json, the DEFAULTS of
transformers' config class for it, and `target`, which reads a config.json with this architecture.
NAMES are the names of its tensors, made of those of other families where these are the same.
"""
