"""One torch operation with device tensors among its arguments: what it does now, and what only when it lands."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


class Operation:
    """Reads wait, views are views, all else is queued. ``every`` are the device tensors among the arguments."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], every: list[Any]) -> None:
        self._func, self._args, self._kwargs, self._every = func, args, kwargs, every
        self._first = every[0]
        self._fake = self._first.fake

    def make(self) -> Any:
        """Do it, as far as it is done before the call returns; gives what the call gives."""
        device = self._kwargs.get("device")
        if device is not None and _torch().device(device).type == "cpu":
            return self._read()
        if self._func.is_view:
            return _map(self._lifted_view, self._run(*self._on_hosts()))
        if self._func._schema.is_mutable:
            return self._change()
        return self._compute()

    def _read(self) -> Any:
        """Block until what writes these tensors has landed."""
        self._fake.queue.land_writes_to(_storages(self._every))
        return self._run(*self._on_hosts())

    def _run(self, args: Any, kwargs: Any) -> Any:
        return self._func(*args, **kwargs)

    def _on_hosts(self, *, later: bool = False) -> Any:
        """The arguments with hosts for device tensors. For ``later``, host tensors are copied: they may change."""

        def host_of(one: Any) -> Any:
            if isinstance(one, type(self._first)):
                return one.host
            return one.clone() if later and _is_tensor(one) else one

        return _map(host_of, (self._args, {name: one for name, one in self._kwargs.items() if name != "device"}))

    def _lifted_view(self, host: Any) -> Any:
        first = self._first
        return type(first)(host, first.index, self._fake, first.allocation) if _is_tensor(host) else host

    def _change(self) -> Any:
        """In place: queued, unless it is host memory that changes."""
        target = self._kwargs.get("out", self._args[0])
        if not isinstance(target, type(self._first)):
            self._read()
            return target
        args, kwargs = self._on_hosts(later=True)
        self._fake.queue.submit(lambda: self._func(*args, **kwargs), _storages([target]))
        return target

    def _compute(self) -> Any:
        """A new tensor: there now, filled when the work lands. What gives none has to wait."""
        shape = self._shape()
        if shape is None:
            return _map(self._lifted_copy, self._read())
        made = self._fake.wrap(
            _torch().empty_strided(shape.shape, shape.stride(), dtype=shape.dtype), self._first.index
        )
        args, kwargs = self._on_hosts(later=True)
        self._fake.queue.submit(lambda: made.host.copy_(self._func(*args, **kwargs)), _storages([made]))
        return made

    def _shape(self) -> Any:
        """The result without its bytes; None where that is no tensor, or depends on them."""

        def bare(one: Any) -> Any:
            host = getattr(one, "host", one)
            return host.to("meta") if _is_tensor(host) else one

        try:
            told = self._run(*_map(bare, (self._args, {k: v for k, v in self._kwargs.items() if k != "device"})))
        except (RuntimeError, NotImplementedError):
            return None
        return told if _is_tensor(told) else None

    def _lifted_copy(self, host: Any) -> Any:
        return self._fake.wrap(host, self._first.index) if _is_tensor(host) else host


def _torch() -> Any:
    return sys.modules["torch"]


def _map(change: Any, tree: Any) -> Any:
    return _torch().utils._pytree.tree_map(change, tree)


def _is_tensor(one: Any) -> bool:
    return isinstance(one, _torch().Tensor)


def _storages(tensors: Iterable[Any]) -> set[int]:
    return {one.allocation.host_address for one in tensors}
