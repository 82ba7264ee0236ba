"""Addresses of producers: where one listens, what it tells others, and who can reach that."""

from __future__ import annotations

import ipaddress
import socket

from pushkv.errors import AddressError

Address = tuple[str, int]


def parse(text: str) -> Address:
    """``host:port``, ``[v6]:port`` or ``tcp://host:port`` as (host, port). Raises AddressError."""
    plain = text.removeprefix("tcp://")
    host, colon, port = plain.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise AddressError(f"{text!r} is no address; write host:port, with port 0 for any free one.")
    return host, int(port)


def parse_dialled(text: str) -> Address:
    """The address of a producer to connect to. Raises AddressError where there can be none."""
    host, port = parse(text)
    if is_wildcard(host) or not port:
        raise AddressError(f"{text!r} cannot be dialled; give the producer's address, as its `address` tells.")
    _resolve(host)
    return host, port


def url(address: Address) -> str:
    """The address as ZeroMQ and people write it."""
    host, port = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host. Raises AddressError for a name that does not resolve."""
    return all(ipaddress.ip_address(one).is_loopback for one in _resolve(host))


def is_wildcard(host: str) -> bool:
    """Whether the host stands for all interfaces, which one can listen on and nobody can dial."""
    return host in ("*", "0.0.0.0", "::")


def is_here(host: str) -> bool:
    """Whether the host is this machine."""
    return is_loopback(host) or any(_bindable(one) for one in _resolve(host))


def _resolve(host: str) -> list[str]:
    if is_wildcard(host):
        return ["0.0.0.0"]
    if _is_literal(host):
        return [host]
    try:
        return [str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise AddressError(f"host {host!r} does not resolve ({error}); give an address that does.") from error


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _bindable(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def check_reachable(bind: Address, advertise: str, peers: tuple[str, ...]) -> None:
    """Refuse an address that the peers who will connect cannot reach. Raises AddressError naming both."""
    if is_wildcard(bind[0]) and not advertise:
        raise AddressError(
            f"{url(bind)} listens everywhere and cannot be dialled; set advertise to this host's address."
        )
    told = parse(advertise)[0] if advertise else bind[0]
    if is_wildcard(told):
        raise AddressError(f"{told!r} cannot be dialled; set advertise to this host's address.")
    remote = [peer for peer in peers if not is_here(peer)]
    for host, role in ((told, "advertised"), (bind[0], "bound")):
        if remote and not is_wildcard(host) and is_loopback(host):
            raise AddressError(
                f"{host} ({role}) reaches this machine only and {remote[0]} is another; "
                "set bind and advertise to an address of the network between them."
            )


def check_guarded(bind: Address, guarded: bool, anyway: bool) -> None:
    """Refuse to listen beyond this machine to whoever comes. Raises AddressError."""
    if guarded or anyway or not (is_wildcard(bind[0]) or not is_loopback(bind[0])):
        return
    raise AddressError(
        f"{url(bind)} would take connections from the network without a cluster key; make one with `pushkv keygen` "
        "and name it in key_file on every host, or set listen_to_the_network_without_a_key."
    )
