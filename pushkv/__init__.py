"""Push-mode KV cache transfer for prefill/decode disaggregation."""
