"""Times of requests through the engine and over HTTP."""
