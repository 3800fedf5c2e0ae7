"""Times of one operation at a time."""
