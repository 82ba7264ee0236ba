"""A seeded soak of both sides over the in-process network, with every fault on at once.

``python -m pushkv.testing.soak --transfers 200000 --seed 1`` runs one. Real sides of the runtime, without their
threads, are driven on the network's virtual clock, so that one seed gives one run.
"""
