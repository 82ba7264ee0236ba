"""pushkv-router: an OpenAI-compatible proxy in front of prefill and decode servers.

A request goes to one prefill server and one decode server at the same time, with a transfer id that is fresh for
every dispatch; the answer is the decode server's. ``config`` has the settings, ``body`` reads requests, ``shapes``
makes the two legs' ``kv_transfer_params``, ``fleet`` knows the servers and their load, ``health`` checks them,
``legs`` talks to one of them, ``dispatch`` runs the two legs of a request and tries again, ``proxy`` is the service.
"""
