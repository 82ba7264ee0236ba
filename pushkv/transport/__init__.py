"""Data movers: NIXL, and an in-process one for tests."""
