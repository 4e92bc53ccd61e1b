"""Why an SSH connection does not come about, and what fixes it: one text for each reason."""

from __future__ import annotations

import shlex

import msgspec

from multinode.core.cluster.cluster import Node
from multinode.core.run.quoting import destination, ssh_words
from multinode.errors import AuthError, ConnectError, HostKeyError, NodeError, ResolveError

__all__ = [
    "CHANGED_KEY",
    "LOCKED_KEY",
    "NO_ANSWER",
    "NO_BANNER",
    "NO_NAME",
    "NO_ROUTE",
    "OTHERWISE",
    "REFUSALS",
    "REFUSED",
    "REFUSED_KEY",
    "TIMED_OUT",
    "UNKNOWN_KEY",
    "Refusal",
]


class Refusal(msgspec.Struct, frozen=True):
    """One reason.

    Attributes:
        kind: the error that it becomes.
        catches: the trouble, in the words of a list.
        message: what is wrong, with `{names}` for what is known only when it happens.
        hint: what fixes it, likewise; each line after the first is a command.
    """

    kind: type[NodeError]
    catches: str
    message: str
    hint: str

    def error(self, node: Node, **values: object) -> NodeError:
        """The error, on a node."""
        known = {"ssh": _typed(node), "accept": _typed(node, accept=True)} | values
        hint = [line.format_map(known) for line in self.hint.split("\n")]
        return self.kind(self.message.format_map(known), node=node.name, ran=_typed(node), hint=hint)


NO_NAME = Refusal(
    ResolveError,
    catches="a node's name does not resolve",
    message="the name {host!r} does not resolve to an address",
    hint="correct the name in the hostfile, or give it a HostName in ~/.ssh/config",
)
NO_ANSWER = Refusal(
    ResolveError,
    catches="a name server that does not answer",
    message="the name {host!r} was not resolved within {within_s:.0f} s: the name servers do not answer",
    hint="see /etc/resolv.conf on this machine; an address instead of the name, or a line in /etc/hosts, needs none",
)
UNKNOWN_KEY = Refusal(
    HostKeyError,
    catches="a host key that known_hosts does not have",
    message="{whose} is not known ({fingerprint})",
    hint="compare the fingerprint and accept it once:\n{accept}",
)
CHANGED_KEY = Refusal(
    HostKeyError,
    catches="a host key that is not the one of known_hosts",
    message="its host key has changed: it shows {shown}, known_hosts has {known}. Either the node was reinstalled, or "
    "something stands between you and it",
    hint="on its console, the first of these (or similar) prints its own key. If it is the new one, run the "
    "second here:\n"
    "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub\n"
    "ssh-keygen -f {file} -R {name} && {accept}",
)
LOCKED_KEY = Refusal(
    AuthError,
    catches="a key that is protected by a passphrase and not loaded",
    message="its key is protected by a passphrase",
    hint="load it into the agent first:\nssh-add",
)
REFUSED_KEY = Refusal(
    AuthError,
    catches="a node refuses our keys; which keys and which user were tried",
    message="it refused our keys for user {user!r} (tried: {tried})",
    hint="name user= and key= in the hostfile, or give it your key:\nssh-copy-id {port}{destination}",
)
REFUSED = Refusal(
    ConnectError,
    catches="no sshd listens on the node's port",
    message="no SSH connection to {where}: refused",
    hint="no sshd listens there: start it on the node, or name another port= in the hostfile",
)
TIMED_OUT = Refusal(
    ConnectError,
    catches="a node that is down, or a firewall that drops SSH",
    message="no SSH connection to {where}: timed out",
    hint="the node is down, or a firewall drops the packets: try to ping it",
)
NO_ROUTE = Refusal(
    ConnectError,
    catches="no route to a node",
    message="no SSH connection to {where}: no route to it",
    hint="the node is down or in another network: check its address and power",
)
NO_BANNER = Refusal(
    ConnectError,
    catches="sshd is frozen, overloaded or drops connections (MaxStartups); or something else listens on its port",
    message="no SSH connection to {where}: the port answers, but not as sshd does in time",
    hint="sshd hangs, has no place for another login (MaxStartups in its sshd_config), or something else listens there",
)
OTHERWISE = Refusal(
    ConnectError,
    catches="an SSH connection that fails in another way, in the words of the system",
    message="no SSH connection to {where}: {reason}",
    hint="see what OpenSSH says:\n{ssh} -v",
)
REFUSALS = (
    NO_NAME,
    NO_ANSWER,
    REFUSED,
    TIMED_OUT,
    NO_ROUTE,
    NO_BANNER,
    UNKNOWN_KEY,
    CHANGED_KEY,
    REFUSED_KEY,
    LOCKED_KEY,
    OTHERWISE,
)


def _typed(node: Node, *, accept: bool = False) -> str:
    """The ssh command that a person would type to see the same."""
    words = ssh_words(node, "ssh")
    if accept:
        words += ["-o", "StrictHostKeyChecking=ask"]
    return shlex.join([*words, destination(node), "true"])
