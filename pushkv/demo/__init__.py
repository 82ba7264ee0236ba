"""A small transformer in two processes, to watch the push path work."""
