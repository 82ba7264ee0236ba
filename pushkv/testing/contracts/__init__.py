"""The built-in backends against the contract; ``python -m pushkv.testing.backend_contract`` runs these."""
