"""PushKV for vLLM: a KV connector that pushes, and a router for prefill and decode servers.

Importing this package loads neither vLLM, torch nor NIXL.
"""
