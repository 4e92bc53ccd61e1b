from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Two networks, of which the default route takes the first; addresses of a third are sent over the second by a rule.
NETWORK = """
for name in mgmt fast; do
  ip link add $name type veth peer name p$name
  ip link set $name up
  ip link set p$name up
done
ip link set lo up
ip addr add 192.0.2.5/24 dev mgmt
ip addr add 10.1.0.5/24 dev fast
ip -6 addr add fd00:1::5/64 dev fast nodad
ip route add default via 192.0.2.1
ip route add default via 10.1.0.1 table 100
ip rule add to 10.9.0.0/16 lookup 100
ip route add 198.51.100.0/24 dev mgmt
ip route add 198.51.100.7/32 via 10.1.0.1
ip route add blackhole 203.0.113.0/24
"""
ASK = """
import json, sys
from multinode.node.facts.network import find_routes
links = [{"name": "mgmt", "addresses": ["192.0.2.5/24"]}, {"name": "fast", "addresses": ["10.1.0.5/24"]}]
print(json.dumps({route["peer"]: route for route in find_routes(sys.argv[1:], links)}))
"""


def routes(*peers: str) -> dict[str, dict[str, Any]]:
    script = f'set -e\n{NETWORK}\nexec "$@"'
    command = ["unshare", "--net", "--map-root-user", "sh", "-c", script, "sh", sys.executable, "-c", ASK, *peers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_the_kernel_itself_says_over_which_interface_it_sends() -> None:
    found = routes("10.9.0.7", "10.1.0.7", "8.8.8.8", "198.51.100.7", "198.51.100.8", "fd00:1::7", "10.1.0.5")
    assert {peer: (route["source"], route["ifname"]) for peer, route in found.items()} == {
        # A rule, which /proc/net/route does not show, takes another table.
        "10.9.0.7": ("10.1.0.5", "fast"),
        "10.1.0.7": ("10.1.0.5", "fast"),
        "8.8.8.8": ("192.0.2.5", "mgmt"),
        "198.51.100.7": ("10.1.0.5", "fast"),
        "198.51.100.8": ("192.0.2.5", "mgmt"),
        "fd00:1::7": ("fd00:1::5", "fast"),
        "10.1.0.5": ("10.1.0.5", "fast"),
    }


def test_an_address_without_a_way_has_its_reason() -> None:
    found = routes("203.0.113.1", "2001:db8::1")
    assert [(route["source"]["is"], bool(route["source"]["reason"])) for route in found.values()] == [
        ("unknown", True)
    ] * 2
