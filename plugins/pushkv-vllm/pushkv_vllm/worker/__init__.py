"""The halves of the connector that run in vLLM's workers: they own the endpoints."""
