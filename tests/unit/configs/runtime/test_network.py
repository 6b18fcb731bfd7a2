"""The address and the interface of this machine that processes of a run use."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from configs.runtime.network import ADDRESS, INTERFACES, VLLM_ADDRESS, join_network, own_address

OWN = {
    entry.address: name
    for name, entries in psutil.net_if_addrs().items()
    for entry in entries
    if entry.family is socket.AF_INET and psutil.net_if_stats()[name].isup
}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (ADDRESS, VLLM_ADDRESS, *INTERFACES):
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("address", OWN)
def test_a_process_uses_the_interface_that_has_the_address(address: str) -> None:
    assert own_address() == "127.0.0.1", "before"
    assert join_network(address, None) == own_address() == address
    assert os.environ["GLOO_SOCKET_IFNAME"] == OWN[address]
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={OWN[address]}"
    assert os.environ["VLLM_HOST_IP"] == address


def test_the_key_and_then_what_the_user_has_set_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    assert join_network("203.0.113.7", "lo") == own_address() == "127.0.0.1"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "ib")


def test_an_address_that_no_interface_has_leaves_gloo_and_nccl_to_look_themselves() -> None:
    assert join_network("203.0.113.7", None) == own_address() == "203.0.113.7"
    assert not any(variable in os.environ for variable in INTERFACES)


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"ray.network_interface=eth77: .* it has .*lo \(127\.0\.0\.1"):
        join_network("127.0.0.1", "eth77")


@pytest.mark.parametrize("address", OWN)
def test_gloo_connects_by_that_address_whatever_the_machine_calls_itself(address: str) -> None:
    program = f"""
import datetime, psutil, threading
from configs.runtime.network import join_network
join_network({address!r}, None)
import torch.distributed as dist
server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
def join(rank):
    store = dist.TCPStore("localhost", server.port, is_master=False)
    groups.append(dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=20)))
groups = []
threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
ends = [c for c in psutil.Process().net_connections() if c.status == "ESTABLISHED"]
print(*{{c.laddr.ip for c in ends if server.port not in (c.laddr.port, c.raddr.port)}})
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == [address]
