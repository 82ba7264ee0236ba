"""``pushkv bench``: descriptors, handover and serving, measured on this machine.

Each measurement is a module with ``measure(settings)``, which gives a plain object for JSON.
:mod:`pushkv.bench.plots` draws such an object, :mod:`pushkv.bench.report` puts it into lines. Everything that is
compared is of one run.
"""
