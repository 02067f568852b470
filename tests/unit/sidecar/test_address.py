"""Which of a host's addresses others reach it by, from the routes of a host that is made up."""

from __future__ import annotations

import socket

import pytest

from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.sidecar import client


@pytest.fixture
def routes(monkeypatch):
    known: dict[str, str] = {}

    class Probe(socket.socket):
        def connect(self, address):
            if address[0] not in known:
                raise OSError("no route")
            self.found = known[address[0]]

        def getsockname(self):
            return self.found, 12345

    monkeypatch.setattr(client.socket, "socket", Probe)
    return known


def test_the_address_that_faces_the_master(routes):
    routes |= {"node0": "10.1.0.7", client.SOMEWHERE: "192.168.0.7"}
    assert client.own_address("node0") == "10.1.0.7"


@pytest.mark.parametrize("at_master", [{"node0": "127.0.1.1"}, {}])
def test_a_master_whose_own_name_is_loopback(routes, at_master):
    routes |= {**at_master, client.SOMEWHERE: "10.1.0.3"}
    assert client.own_address("node0") == "10.1.0.3"


def test_a_host_that_nobody_reaches(routes):
    routes["node0"] = "127.0.0.1"
    with pytest.raises(ConfigError, match=r"no address that the others could reach \(MASTER_ADDR=node0\)"):
        client.own_address("node0")
