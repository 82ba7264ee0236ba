"""Endpoints: the transfer thread, the control thread and the handshake."""
