"""Memory backends: each describes the memory of one kind of device."""
