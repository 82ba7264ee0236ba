"""Settings of an endpoint, checked when they are made."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from pushkv.core.limits import Limits
from pushkv.core.ways import Costs
from pushkv.errors import ConfigError

LONGEST = 86400.0
"""No deadline and no lease is longer than a day, in seconds."""

C = TypeVar("C", bound=msgspec.Struct)


def _check_types(config: msgspec.Struct, prefix: str = "") -> None:
    """Settings written in Python are held to the types that plain data is converted to."""
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{prefix}{field.name} is {value!r:.80}: {str(error).lower()}.") from error


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; choose {' or '.join(map(repr, allowed))}.")


class NixlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the NIXL agent is made; ``parameters`` go to the backend as they are (``num_threads``, ``device_list``)."""

    backend: Literal["UCX", "LIBFABRIC"] = "UCX"
    parameters: dict[str, str] = msgspec.field(default_factory=dict)
    progress_thread_delay_us: int = 10_000

    def __post_init__(self) -> None:
        _one_of("nixl.backend", self.backend, ("UCX", "LIBFABRIC"))
        _check_types(self, "nixl.")
        if self.progress_thread_delay_us < 0:
            raise ConfigError(f"nixl.progress_thread_delay_us is {self.progress_thread_delay_us}; give 0 or more.")


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a Producer or a Consumer.

    The control plane: with a cluster key, in ``key_file`` or the environment's ``PUSHKV_CLUSTER_KEY``, every control
    connection is encrypted and both ends have proven that they hold it. Without one a producer listens to this
    machine alone, unless ``listen_to_the_network_without_a_key`` is set. ``allow`` narrows, to addresses or networks,
    who may connect.

    ``verify="checksum"``: the producer sends a digest (CRC-32) of the bytes it WRITEs, and the consumer takes one of
    what has arrived, in its blocks or in a landing slot; where they differ the transfer fails. Both sides must say
    the same.

    ``landing``: ``direct`` has producers WRITE into the consumer's blocks. With ``landing`` they gather parts into
    staging slots and WRITE those into slots of the consumer's landing ring, which scatters them; then only slots are
    registered, and both sides need it. ``auto`` takes the way that is cheaper by ``landing_costs`` where both sides
    have slots, a transfer at a time; the consumer's setting counts. ``landing_bytes`` are allocated for slots of
    ``slot_bytes`` each, on the cache's device, when the endpoint is made.

    ``stream`` is a producer's: which parts leave while a prompt is computed. ``request``: none, ``chunk``: the tokens
    that each call of ``stage`` adds, ``layer``: also the layers that one with ``layers`` adds, ``auto``: what
    ``layer`` does, but parts of less than 4 MiB wait for more. ``layers`` is whether the engine will call ``stage``
    with ``layers``, so that consumers with ``landing="auto"`` know how little is left when a prompt is computed.

    ``free_tail`` is a consumer's: behind the tokens that it offers their last block is nobody's, so that producers
    may copy it whole, in fewer pieces, with whatever their block holds there. Not where bytes are verified.

    ``quarantine_limit`` is the share of a consumer's blocks that may be quarantined before it offers no more.

    ``engine`` and ``rank`` name the endpoint. A producer listens on ``bind`` (port 0: any free one) and tells peers
    ``advertise``, by default what it is bound to. ``peers`` are the hosts that will connect: naming one that is not
    this machine makes an address that only this machine can reach an error. ``silence`` is after how many seconds
    without a word a peer counts as lost (one whose process can be seen to run on this machine after
    ``limits.deadline``, if that is longer), ``stall`` after how many seconds inside one call of the data mover the
    transfer thread counts as stuck. ``idle_poll`` and ``due_poll`` bound, in seconds, how long the transfer thread
    sleeps between looks at its notifications, with nothing open and with something open, where no knock over the
    control connection wakes it.
    """

    engine: str
    rank: int = 0
    bind: str = "127.0.0.1:0"
    advertise: str = ""
    peers: tuple[str, ...] = ()
    key_file: str = ""
    allow: tuple[str, ...] = ()
    listen_to_the_network_without_a_key: bool = False
    verify: Literal["off", "checksum"] = "off"
    quarantine_limit: float = 0.1
    landing: Literal["direct", "landing", "auto"] = "direct"
    landing_bytes: int = 256 << 20
    slot_bytes: int = 16 << 20
    landing_costs: Costs = Costs()
    stream: Literal["auto", "request", "chunk", "layer"] = "auto"
    free_tail: bool = False
    layers: bool = False
    transport: Literal["nixl", "memory"] = "nixl"
    nixl: NixlConfig = NixlConfig()
    limits: Limits = Limits()
    connect_timeout: float = 20.0
    silence: float = 5.0
    stall: float = 5.0
    idle_poll: float = 0.05
    due_poll: float = 0.005

    def __post_init__(self) -> None:
        _one_of("transport", self.transport, ("nixl", "memory"))
        _one_of("verify", self.verify, ("off", "checksum"))
        _one_of("landing", self.landing, ("direct", "landing", "auto"))
        _one_of("stream", self.stream, ("auto", "request", "chunk", "layer"))
        _check_types(self)
        if not 0 < self.slot_bytes <= self.landing_bytes < 1 << 48:
            raise ConfigError(
                f"landing_bytes is {self.landing_bytes}, slot_bytes {self.slot_bytes}; give room for at least a slot."
            )
        if not self.engine.isprintable() or not 0 < len(self.engine) <= 200:
            raise ConfigError(f"engine is {self.engine!r:.80}; give a name of 1 to 200 characters.")
        if not 0 <= self.rank < 1 << 31:
            raise ConfigError(f"rank is {self.rank}; count ranks from 0.")
        for name in ("connect_timeout", "silence", "stall", "idle_poll", "due_poll"):
            if not 0 < getattr(self, name) <= LONGEST:
                raise ConfigError(f"{name} is {getattr(self, name)}; give seconds above 0, at most a day.")
        if not 0 <= self.quarantine_limit <= 1:
            raise ConfigError(f"quarantine_limit is {self.quarantine_limit}; give a share of the cache, from 0 to 1.")
        _check_limits(self.limits)
        _check_costs(self.landing_costs)


def _check_costs(costs: Costs) -> None:
    _check_types(costs, "landing_costs.")
    for field in msgspec.structs.fields(costs):
        value = getattr(costs, field.name)
        if value is not None and not (value > 0 or (value == 0 and field.name != "wire")):
            raise ConfigError(f"landing_costs.{field.name} is {value}; give a number above 0.")


def _check_limits(limits: Limits) -> None:
    _check_types(limits, "limits.")
    for field in msgspec.structs.fields(limits):
        value = getattr(limits, field.name)
        if not value > 0:
            raise ConfigError(f"limits.{field.name} is {value}; give a number above 0.")
    for name in ("deadline", "lease", "stage_deadline", "resend", "resend_most", "ask_proof"):
        if getattr(limits, name) > LONGEST:
            raise ConfigError(f"limits.{name} is {getattr(limits, name)} s; give at most a day ({LONGEST:g} s).")


def read_config(cls: type[C], settings: Mapping[str, Any]) -> C:
    """A config from plain data (JSON, YAML, ``--kv-transfer-config``). Raises ConfigError naming the setting."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"The settings are {settings!r:.80}; give a mapping of names to values.")
    _refuse_typos(cls, settings, "")
    try:
        return msgspec.convert(dict(settings), cls, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}{_given(cls, settings, str(error))}; see pushkv.config.{cls.__name__}.") from error


def _given(cls: type[Any], settings: Mapping[str, Any], told: str) -> str:
    """What was given where msgspec's message points, and what may be."""
    path = re.search(r"`\$\.([\w.]+)`$", told)
    value, kind = settings, cls
    for name in path[1].split(".") if path else ():
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        if not isinstance(value, Mapping) or name not in fields or name not in value:
            return ""
        value, kind = value[name], fields[name]
    choices = f": choose {' or '.join(map(repr, get_args(kind)))}" if get_origin(kind) is Literal else ""
    return f" ({value!r:.80} was given{choices})" if path else ""


def _refuse_typos(cls: type[Any], settings: Mapping[str, Any], where: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(cls)}
    for name, value in settings.items():
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(fields)}."
            raise ConfigError(f"There is no setting {where + str(name)!r}; {hint}")
        inner = fields[name]
        if isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _refuse_typos(inner, value, f"{where}{name}.")
