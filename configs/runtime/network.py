"""The address by which other machines reach this one, and the network interface that has it.

Every process of a run takes both from here, because a guess fails on common machines: Debian maps the machine's own
name, which gloo looks up, to 127.0.1.1, and compute nodes may have no default route.
"""

import os
import socket

import psutil

ADDRESS = "SLIPSTREAM_NODE_ADDRESS"
"""The environment variable that hands the address to a process's children, such as those of an engine."""
VLLM_ADDRESS = "VLLM_HOST_IP"
"""The variable by which vLLM knows the address, which else asks for the route to 8.8.8.8."""
INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""The variables that gloo and NCCL read, with the form of a name there: NCCL takes it for a prefix without `=`."""


def join_network(address: str, interface: str | None) -> str:
    """Let this process and its children talk to other machines through one interface. Returns the address they have.

    A variable that the user has set for gloo or NCCL stays.

    Args:
        address: the address by which Ray knows this machine.
        interface: ray.network_interface; None takes the interface that has `address`.

    Raises:
        ValueError: this machine has no such interface, or it has no IPv4 address.
    """
    address, interface = find_interface(address, interface)
    os.environ[ADDRESS] = address
    os.environ.setdefault(VLLM_ADDRESS, address)
    if interface is not None:
        for variable, form in INTERFACES.items():
            os.environ.setdefault(variable, form.format(interface))
    return address


def find_interface(address: str, interface: str | None) -> tuple[str, str | None]:
    """Return the address and the interface that `join_network` chooses, and raise what it raises."""
    addresses = {
        name: [entry.address for entry in entries if entry.family is socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    if interface is not None:
        if not addresses.get(interface):
            there = ", ".join(f"{name} ({', '.join(own)})" for name, own in addresses.items() if own)
            raise ValueError(
                f"ray.network_interface={interface}: {socket.gethostname()} has no interface of that name with an IPv4 "
                f"address; it has {there}"
            )
        return addresses[interface][0], interface
    # None has it where Ray's address is another machine's that passes on to this one: gloo and NCCL look then.
    return address, next((name for name, own in addresses.items() if address in own), None)


def own_address() -> str:
    """Return the address by which other machines reach this one. In a process that has not joined the network, which
    only other processes of this machine can mean, this is the loopback address."""
    return os.environ.get(ADDRESS, "127.0.0.1")
