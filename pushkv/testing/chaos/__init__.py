"""Chaos: producers and consumers in processes of their own, over real NIXL, killed, stopped and cancelled at random.

``python -m pushkv.testing.chaos --seconds 120 --seed 3`` runs it; ``--tls tcp`` has UCX use TCP. The seed fixes what
is done, not when the machine gets round to it.
"""
