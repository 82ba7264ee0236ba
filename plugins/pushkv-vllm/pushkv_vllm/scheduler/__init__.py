"""The halves of the connector that run beside vLLM's scheduler."""
