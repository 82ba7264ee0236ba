"""Fakes and contract suites, public so that plug-ins can use them."""
