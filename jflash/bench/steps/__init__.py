"""Times of whole steps and prompts."""
