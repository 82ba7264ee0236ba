"""The protocol and the geometry, without IO: time is an argument, effects are returned as commands."""
