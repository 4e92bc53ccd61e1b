"""Why a node is not reached, or does not run the agent, and what fixes it: one text for each reason."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from multinode.cluster.cluster import Node
from multinode.cluster.quoting import as_steps, destination, ssh_words
from multinode.errors import (
    AuthError,
    ConnectError,
    ContactLost,
    HostKeyError,
    MultinodeError,
    NodeFailed,
    ResolveError,
)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One reason.

    Attributes:
        kind: the error that it becomes.
        catches: the trouble, in the words of a list.
        message: what is wrong, with `{names}` for what is known only when it happens.
        hint: what fixes it, likewise; each line after the first is a command. `{login}` is `ssh NODE` as it is
            typed, `{verbose}` the same with `-v`, `{accept}` the same where it asks about an unknown host key.
        says: what OpenSSH's client prints then; its named groups are values for `message` and `hint`.
    """

    kind: type[MultinodeError]
    catches: str
    message: str
    hint: str
    says: str | None = None

    def error(self, node: Node, values: Mapping[str, object] | None = None, **more: object) -> MultinodeError:
        """The error, on a node."""
        known = {
            "login": _login(node),
            "verbose": _login(node, "-v"),
            "accept": _login(node, "-o", "StrictHostKeyChecking=ask"),
            "name": node.name,
            **(values or {}),
            **more,
        }
        hint = [as_steps(line.format_map(known), [node]) for line in self.hint.split("\n")]
        message = self.message.format_map(known)
        return self.kind(message, node=node.name, ran=as_steps(f"{_login(node)} true", [node]), hint=hint)


NO_ANSWER = Refusal(
    kind=ResolveError,
    catches="a name server that does not answer",
    message="the name {host!r} was not resolved: the name servers do not answer",
    hint="see /etc/resolv.conf on this machine; an address instead of the name, or a line in /etc/hosts, needs none",
    says=r"Could not resolve hostname (?P<host>[^:]*): Temporary failure",
)
NO_NAME = Refusal(
    kind=ResolveError,
    catches="a node's name does not resolve",
    message="the name {host!r} does not resolve to an address",
    hint="correct the name in the hostfile, or give it a HostName in ~/.ssh/config",
    says=r"Could not resolve hostname (?P<host>[^:]*):|hostname contains invalid characters",
)
CHANGED_KEY = Refusal(
    kind=HostKeyError,
    catches="a host key that is not the one of known_hosts",
    message="its host key has changed: it shows {shown}, known_hosts has {known}. Either the node was reinstalled, or "
    "something stands between you and it",
    hint="on its console, the first of these (or similar) prints its own key. If it is the new one, run the "
    "second here:\n"
    "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub\n"
    "ssh-keygen -f {file} -R {entry} && {accept} true",
    says=r"REMOTE HOST IDENTIFICATION HAS CHANGED",
)
REVOKED_KEY = Refusal(
    kind=HostKeyError,
    catches="a host key that was revoked (@revoked, RevokedHostKeys)",
    message="its host key was revoked ({fingerprint})",
    hint="if it was revoked by mistake, take it out of RevokedHostKeys or @revoked; else give the node a new "
    "one, there as root:\n"
    "rm /etc/ssh/ssh_host_*; ssh-keygen -A",
    says=r"REVOKED HOST KEY|revoked by file|was revoked",
)
BAD_CERTIFICATE = Refusal(
    kind=HostKeyError,
    catches="a host certificate that does not hold (expired, for another name, of an unknown CA)",
    message="its host certificate does not hold: {reason}",
    hint="have the CA sign the node's host key anew, for the name by which it is reached; or accept the key itself "
    "once, after comparing {fingerprint}:\n{accept} -o HostKeyAlgorithms=-*-cert-* true",
)
KEPT_NOWHERE = Refusal(
    kind=HostKeyError,
    catches="a host key that is asked for, and kept nowhere (UserKnownHostsFile /dev/null)",
    message="its host key is not known ({fingerprint}), and the SSH configuration keeps none (UserKnownHostsFile "
    "/dev/null)",
    hint="name a file for it in the SSH configuration (UserKnownHostsFile ~/.ssh/known_hosts), then compare the "
    "fingerprint and accept it once:\n{accept} true",
)
UNKNOWN_KEY = Refusal(
    kind=HostKeyError,
    catches="a host key that known_hosts does not have",
    message="its host key is not known ({fingerprint})",
    hint="compare the fingerprint and accept it once:\n{accept} true",
    says=r"Host key verification failed|No \S+ host key is known",
)
NO_ALGORITHM = Refusal(
    kind=ConnectError,
    catches="client and sshd have no algorithm in common (an old sshd, or a hardened one)",
    message="no SSH connection to {where}: no {what} in common; it offers {offer}",
    hint="allow one of these for it in ~/.ssh/config (KexAlgorithms, HostKeyAlgorithms, Ciphers or MACs, with + before "
    "the name), or update its sshd",
    says=r"no matching (?P<what>.+?) found\. Their offer: (?P<offer>\S+)",
)
NOT_SSH = Refusal(
    kind=ConnectError,
    catches="something that is no sshd listens on the node's port",
    message="no SSH connection to {where}: what listens there is no sshd",
    hint="name sshd's port in the hostfile: port=",
    says=r"banner line contains invalid characters|No banner received|Bad remote protocol|invalid format|"
    r"Protocol major versions differ",
)
NO_PLACE = Refusal(
    kind=ConnectError,
    catches="sshd drops the connection at once (MaxStartups, or a block list)",
    message="no SSH connection to {where}: sshd closed it before the login began: it has no place for another login "
    "(MaxStartups), or blocks this machine",
    hint="end other logins there or raise MaxStartups in its sshd_config; see whether fail2ban or PerSourcePenalties "
    "blocks this machine",
    says=r"(?:kex|ssh)_exchange_identification: (?:read: )?Connection (?:closed|reset)|MaxStartups|"
    r"Not allowed at this time",
)
FROZEN = Refusal(
    kind=ConnectError,
    catches="sshd is frozen or overloaded",
    message="no SSH connection to {where}: the port answers, but not as sshd does in time",
    hint="sshd hangs there, or something else listens: restart it on the node's console",
    says=r"timed out during banner exchange|Connection to \S+ port \d+ timed out",
)
REFUSED = Refusal(
    kind=ConnectError,
    catches="no sshd listens on the node's port",
    message="no SSH connection to {where}: refused",
    hint="no sshd listens there: start it on the node, or name another port= in the hostfile",
    says=r"connect to host .*: Connection refused",
)
TIMED_OUT = Refusal(
    kind=ConnectError,
    catches="a node that is down, or a firewall that drops SSH",
    message="no SSH connection to {where}: timed out",
    hint="the node is down, or a firewall drops the packets: try to ping it",
    says=r"connect to host .*: (?:Connection|Operation) timed out",
)
NO_ROUTE = Refusal(
    kind=ConnectError,
    catches="no route to a node",
    message="no SSH connection to {where}: no route to it",
    hint="the node is down or in another network: check its address and power",
    says=r"connect to host .*: (?:No route to host|Network is unreachable|Host is down)",
)
STILL_OPENING = Refusal(
    kind=ConnectError,
    catches="a connection that takes longer to open than the command may take",
    message="no SSH connection to {where}: timed out while it was being opened",
    hint="see how far it comes:\n{verbose} true",
)
FORWARD_REFUSED = Refusal(
    kind=ConnectError,
    catches="a jump host that does not forward",
    message="its jump host {gate} does not forward to {where}: AllowTcpForwarding or PermitOpen in its sshd_config, or "
    "no-port-forwarding at our key there",
    hint="allow it there (AllowTcpForwarding yes), or name another jump host: jump= in the hostfile",
    says=r"administratively prohibited",
)
TARGET_REFUSED = Refusal(
    kind=ConnectError,
    catches="a node that its jump host cannot reach",
    message="its jump host {gate} cannot reach {where}: {reason}",
    hint="correct the node's name, address or port as the jump host knows it, and see whether the node is up",
    says=r"open failed: connect failed: (?P<reason>[^\r\n]*)",
)
TOO_MANY_KEYS = Refusal(
    kind=AuthError,
    catches="more keys are offered than sshd lets try (MaxAuthTries)",
    message="sshd let us try no further key: too many authentication failures (offered: {tried})",
    hint="offer the right one alone: IdentitiesOnly yes and IdentityFile for it in ~/.ssh/config",
    says=r"Too many authentication failures",
)
SECOND_FACTOR = Refusal(
    kind=AuthError,
    catches="sshd wants a second factor",
    message="the key was accepted, and sshd wants {methods} besides",
    hint="log in once, and multinode uses that connection: in ~/.ssh/config for it ControlMaster auto, ControlPath "
    "~/.ssh/cm-%C, ControlPersist 8h; then:\n{login} true",
)
REFUSED_KEY = Refusal(
    kind=AuthError,
    catches="a node refuses our keys; which keys and which user were tried",
    message="it refused our keys for user {user!r} (tried: {tried})",
    hint="name user= and key= in the hostfile (User and IdentityFile for a jump host), or give it your key:\n{copy}",
    says=r"Permission denied \([^)]*\)",
)
NO_KEY_TAKEN = Refusal(
    kind=AuthError,
    catches="an sshd that takes no keys",
    message="sshd takes no keys for user {user!r}: it wants {methods}",
    hint="allow keys in its sshd_config (PubkeyAuthentication yes); or log in once, and multinode uses that "
    "connection: in ~/.ssh/config for it ControlMaster auto, ControlPath ~/.ssh/cm-%C, ControlPersist 8h; then:\n"
    "{login} true",
)
OPEN_KEY = Refusal(
    kind=AuthError,
    catches="a private key that others can read, which ssh does not use",
    message="its key {file} can be read by others, so that ssh does not use it",
    hint="take that from them:\nchmod 600 {file}",
    says=r"Permissions \d+ for '(?P<file>[^']+)' are too open",
)
LOCKED_KEY = Refusal(
    kind=AuthError,
    catches="a key that is protected by a passphrase and not loaded",
    message="its key {file} is protected by a passphrase",
    hint="load it into the agent first:\nssh-add {file}",
)
AGENT_REFUSED = Refusal(
    kind=AuthError,
    catches="an SSH agent that does not sign (a key to be confirmed or touched, a locked agent)",
    message="the SSH agent did not sign with a key that the node accepts: {reason}",
    hint="a key that wants to be confirmed or touched does for one login by hand, whose connection multinode uses: in "
    "~/.ssh/config for it ControlMaster auto, ControlPath ~/.ssh/cm-%C, ControlPersist 8h; then:\n{login} true",
    says=r"sign_and_send_pubkey: (?P<reason>signing failed[^\r\n]*)",
)
BAD_KEY = Refusal(
    kind=AuthError,
    catches="a file that is no private key",
    message="its key {file} cannot be used: {reason}",
    hint="name the private key (not the .pub file): key= in the hostfile, or IdentityFile",
    says=r'Load key "(?P<file>[^"]+)": (?P<reason>[^\r\n]*)',
)
MAX_SESSIONS = Refusal(
    kind=ConnectError,
    catches="no further session on the connection (MaxSessions)",
    message="sshd refused another session on the connection",
    hint="raise MaxSessions in its sshd_config (3 is enough); or end a connection of your own (ControlMaster) that is "
    "full:\n"
    "ssh -O exit {name}",
    says=r"Session open refused by peer|session request failed",
)
NO_EXEC = Refusal(
    kind=NodeFailed,
    catches="an sshd that runs no command for the user: no shell, sftp alone",
    message="sshd there runs no command for us: the exec request failed",
    hint="the user's shell has to be there (getent passwd USER on its console), and its sshd_config must not force "
    "internal-sftp",
    says=r"exec request failed",
)
LOGIN_ENDED = Refusal(
    kind=AuthError,
    catches="an sshd that ends the login itself: an expired account, pam_access, /etc/nologin",
    message="sshd ended the login of user {user!r}: {reason}",
    hint="sshd's log on the node says why (journalctl -u ssh): an account that has expired, access rules, "
    "/etc/nologin; another user is user= in the hostfile",
    says=r"Connection (?:closed|reset) by|Received disconnect from \S+ port \d+:\d+: *(?P<reason>[^\r\n]*)",
)
SLOW_LOGIN = Refusal(
    kind=ConnectError,
    catches="a login that takes too long (a reverse look-up of our address, LDAP)",
    message="sshd on {where} has agreed on keys, and not answered the login in time",
    hint="see what it waits for there: UseDNS no in its sshd_config; LDAP or another source of accounts and keys",
)
OTHERWISE = Refusal(
    kind=ConnectError,
    catches="an SSH connection that fails in another way, in the words of ssh",
    message="no SSH connection to {where}: {reason}",
    hint="see what OpenSSH says:\n{verbose} true",
)
BEYOND_FABRIC = Refusal(
    kind=ConnectError,
    catches="an SSH connection that fails in another way where Fabric stands in for ssh",
    message="no SSH connection to {where} through Fabric: {reason}",
    hint="install an OpenSSH client, through which multinode connects unless it is told otherwise; on Debian or "
    "Ubuntu, as root:\n"
    "apt-get install openssh-client",
)
SWALLOWED = Refusal(
    kind=NodeFailed,
    catches="a shell that ends before it runs a command: `exit` in ~/.bashrc, a ForceCommand that does something else",
    message="what SSH runs first there (~/.bashrc, ~/.ssh/rc, a ForceCommand) swallowed the command{printed}",
    hint="this has to print ok, and at once; what keeps it from that belongs behind a test for a terminal, as in "
    "[ -t 0 ]:\n{login} echo ok",
)
SILENT = Refusal(
    kind=ContactLost,
    catches="a shell that runs no command in time: ~/.bashrc waits for input or starts another shell; or it hangs",
    message="it opens sessions, and ran no command in one within {within_s:.0f} s: what SSH runs first there "
    "(~/.bashrc, ~/.ssh/rc, a ForceCommand) swallows it, or the node hangs{printed}",
    hint="this has to print ok, and at once; what keeps it from that belongs behind a test for a terminal, as in "
    "[ -t 0 ]:\n{login} echo ok",
)
NO_PYTHON = Refusal(
    kind=NodeFailed,
    catches="no python3 in the non-interactive shell",
    message="python3 is not on the PATH of a non-interactive shell, and the agent needs it: {said}",
    hint="name one on its line of the hostfile (python=/path/to/python3), or install it there (Debian, Ubuntu: apt-get "
    "install python3); then:\n{login} python3 -V",
)
OLD_PYTHON = Refusal(
    kind=NodeFailed,
    catches="a python3 that is older than 3.9",
    message="{python} on it is Python {version}, and the agent needs 3.9 or newer",
    hint="name a newer one on its line of the hostfile: python=/path/to/python3",
)
NOT_STORED = Refusal(
    kind=NodeFailed,
    catches="a home directory that is full, read-only or somebody else's",
    message="the agent could not be stored in ~/{folder}: {said}",
    hint="the home directory has to be writable and not full, and ~/.multinode a directory of yours; see, and take "
    "back as root what root left there:\n"
    "{login} 'ls -ld ~ ~/.multinode; df -h ~'\n"
    "chown -R USER ~USER/.multinode",
)
AGENT_ENDED = Refusal(
    kind=NodeFailed,
    catches="an agent that ends without an answer, in its own words or those of the shell",
    message="the agent's {verb} ended with code {code}: {said}",
    hint="see what the node makes of a command:\n{login} python3 -V",
)
REFUSALS = tuple(one for one in list(globals().values()) if isinstance(one, Refusal))
"""In the order in which what OpenSSH says is looked through: the first that matches counts."""


def find_refusal(said: str, among: Sequence[Refusal] = REFUSALS) -> tuple[Refusal, dict[str, str]] | None:
    """What OpenSSH's client means, and the values that it names; None where it says nothing of the kind."""
    for refusal in among:
        found = re.search(refusal.says, said) if refusal.says is not None else None
        if found:
            return refusal, {name: text or "" for name, text in found.groupdict().items()}
    return None


def of_jump_host(error: MultinodeError, gate: Node, node: Node) -> MultinodeError:
    """What keeps a jump host from being reached, as an error of the node behind it."""
    message = f"its jump host {gate.name}: {error.message}"
    return type(error)(message, node=node.name, ran=error.ran, hint=error.hint_lines)


def copy_command(node: Node) -> str:
    """The command that gives a node our key, with the options of its line."""
    options = {"-F": node.ssh_config, "-p": node.port, "-i": node.key}
    words = [str(word) for option in options.items() if option[1] is not None for word in option]
    return shlex.join(
        ["ssh-copy-id", *words, *(["-o", f"ProxyJump={node.jump}"] if node.jump else []), destination(node)]
    )


def _login(node: Node, *options: str) -> str:
    """The ssh command that a person would type, up to where the command on the node follows."""
    program, *words = ssh_words(node, "ssh")
    return shlex.join([program, *words, *options, destination(node)])
