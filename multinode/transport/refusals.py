"""Why SSH or Slurm does not bring us to a node, or it cannot run the agent, and the fix: one text per reason."""

from __future__ import annotations

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
    NodeGone,
    ResolveError,
)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One reason."""

    kind: type[MultinodeError]  # the error class
    catches: str  # the problem, for a list
    message: str  # the problem, with `{names}` for values known at run time
    # the fix, with `{names}`; each line after the first is a command. `{login}` is `ssh NODE` as typed, `{verbose}` is
    # it with `-v`, `{accept}` asks about an unknown host key.
    hint: str
    # what OpenSSH's client or srun prints (text_pattern), with values for `message` and `hint`; none where the caller
    # finds the reason in another way
    texts: tuple[str, ...] = ()

    def error(self, node: Node, values: Mapping[str, object] | None = None, **more: object) -> MultinodeError:
        """The error, on a node."""
        texts = {
            "login": _login(node),
            "verbose": _login(node, "-v"),
            "accept": _login(node, "-o", "StrictHostKeyChecking=ask"),
            "name": node.name,
            **(values or {}),
            **more,
        }
        message, hint = self.worded(texts)
        steps = [as_steps(line, [node]) for line in hint]
        return self.kind(message, node=node.name, ran=as_steps(f"{_login(node)} true", [node]), hint=steps)

    def worded(self, values: Mapping[str, object]) -> tuple[str, list[str]]:
        """Message, and lines of the hint, with these values."""
        return self.message.format_map(values), [line.format_map(values) for line in self.hint.split("\n")]


NO_ANSWER = Refusal(
    kind=ResolveError,
    catches="a name server does not answer",
    message="could not resolve {host!r}: the name servers do not answer",
    hint="check /etc/resolv.conf on this machine, use an IP address in the hostfile, or add the name to /etc/hosts",
    texts=("Could not resolve hostname {host}: Temporary failure",),
)
NO_NAME = Refusal(
    kind=ResolveError,
    catches="the name of a node does not resolve",
    message="the name {host!r} does not resolve to an address",
    hint="correct the name in the hostfile, or set HostName for it in ~/.ssh/config",
    texts=("Could not resolve hostname {host}:", "hostname contains invalid characters"),
)
CHANGED_KEY = Refusal(
    kind=HostKeyError,
    catches="a host key differs from known_hosts",
    message=(
        "its host key has changed: it presents {shown}, but known_hosts has {known}. Either the node was reinstalled, "
        "or something intercepts the connection"
    ),
    hint=(
        "on the node's console, print the fingerprint of its key with the first command (if the key has another type, "
        "change the file name). If it matches the presented key, run the second command on this machine:\nssh-keygen "
        "-lf /etc/ssh/ssh_host_ed25519_key.pub\nssh-keygen -f {file} -R {entry} && {accept} true"
    ),
    texts=("REMOTE HOST IDENTIFICATION HAS CHANGED",),
)
REVOKED_KEY = Refusal(
    kind=HostKeyError,
    catches="a host key is revoked (@revoked, RevokedHostKeys)",
    message="its host key was revoked ({fingerprint})",
    hint=(
        "if the key was revoked by mistake, remove it from the RevokedHostKeys file, or delete its @revoked "
        "line in known_hosts; otherwise create new keys on the node, as root:\nrm /etc/ssh/ssh_host_*; ssh-keygen -A"
    ),
    texts=("REVOKED HOST KEY", "revoked by file", "was revoked"),
)
BAD_CERTIFICATE = Refusal(
    kind=HostKeyError,
    catches="a host certificate is invalid (expired, for another name, from an unknown CA)",
    message="its host certificate is invalid: {reason}",
    hint=(
        "have the CA sign the node's host key again, for the name that you use; or compare the fingerprint "
        "({fingerprint}) and accept the key once:\n{accept} -o HostKeyAlgorithms=-*-cert-* true"
    ),
)
KEPT_NOWHERE = Refusal(
    kind=HostKeyError,
    catches="a host key is unknown, and ssh does not store host keys (UserKnownHostsFile /dev/null)",
    message=(
        "its host key is unknown ({fingerprint}), and the SSH configuration stores no keys (UserKnownHostsFile "
        "/dev/null)"
    ),
    hint=(
        "set UserKnownHostsFile ~/.ssh/known_hosts for the node in the SSH configuration, then compare the fingerprint "
        "and accept the key once:\n{accept} true"
    ),
)
UNKNOWN_KEY = Refusal(
    kind=HostKeyError,
    catches="a host key is not in known_hosts",
    message="its host key is unknown ({fingerprint})",
    hint="compare the fingerprint and accept the key once:\n{accept} true",
    texts=("Host key verification failed", "No ... host key is known"),
)
NO_ALGORITHM = Refusal(
    kind=ConnectError,
    catches="ssh and sshd have no algorithm in common (sshd is old or hardened)",
    message="no SSH connection to {where}: ssh and sshd have no {what} in common; sshd offers {offer}",
    hint="allow one of these algorithms for the node in ~/.ssh/config (KexAlgorithms, HostKeyAlgorithms, Ciphers or "
    "MACs, with + before the name), or update its sshd",
    texts=("no matching {what} found. Their offer: {offer}",),
)
NOT_SSH = Refusal(
    kind=ConnectError,
    catches="something other than sshd listens on the node's port",
    message="no SSH connection to {where}: something other than sshd listens there",
    hint="set sshd's port in the hostfile: port=",
    texts=(
        "banner line contains invalid characters",
        "No banner received",
        "Bad remote protocol",
        "invalid format",
        "Protocol major versions differ",
    ),
)
NO_PLACE = Refusal(
    kind=ConnectError,
    catches="sshd closes the connection immediately (MaxStartups or a block list)",
    message=(
        "no SSH connection to {where}: sshd closed it before login, because there are too many logins (MaxStartups) or "
        "because sshd blocks this machine"
    ),
    hint=(
        "close other logins to the node, or raise MaxStartups in its sshd_config; check whether fail2ban or "
        "PerSourcePenalties blocks this machine"
    ),
    texts=(
        "_exchange_identification: ...Connection closed",
        "_exchange_identification: ...Connection reset",
        "MaxStartups",
        "Not allowed at this time",
    ),
)
FROZEN = Refusal(
    kind=ConnectError,
    catches="sshd is frozen or overloaded",
    message="no SSH connection to {where}: the port accepts connections, but sshd does not answer in time",
    hint="sshd hangs, or another program listens on the port: restart sshd from the node's console",
    texts=("timed out during banner exchange", "Connection to ... port ... timed out"),
)
REFUSED = Refusal(
    kind=ConnectError,
    catches="no sshd listens on the node's port",
    message="no SSH connection to {where}: refused",
    hint="no sshd listens on this port: start sshd on the node, or set port= in the hostfile",
    texts=("connect to host ...: Connection refused",),
)
TIMED_OUT = Refusal(
    kind=ConnectError,
    catches="a node is down, or a firewall drops SSH",
    message="no SSH connection to {where}: timed out",
    hint="the node is down, or a firewall drops the packets: ping the node",
    texts=("connect to host ...: Connection timed out", "connect to host ...: Operation timed out"),
)
NO_ROUTE = Refusal(
    kind=ConnectError,
    catches="no route to a node",
    message="no SSH connection to {where}: no route to it",
    hint="the node is down or in another network: check its address and power",
    texts=(
        "connect to host ...: No route to host",
        "connect to host ...: Network is unreachable",
        "connect to host ...: Host is down",
    ),
)
STILL_OPENING = Refusal(
    kind=ConnectError,
    catches="a connection does not open before the deadline of the command",
    message="no SSH connection to {where}: timed out while connecting",
    hint="see how far the connection gets:\n{verbose} true",
)
FORWARD_REFUSED = Refusal(
    kind=ConnectError,
    catches="a jump host does not forward",
    message=(
        "its jump host {gate} does not forward to {where}: AllowTcpForwarding or PermitOpen in its sshd_config forbids "
        "it, or your key has the option no-port-forwarding"
    ),
    hint="allow forwarding on the jump host (AllowTcpForwarding yes), or name another jump host: jump= in the hostfile",
    texts=("administratively prohibited",),
)
TARGET_REFUSED = Refusal(
    kind=ConnectError,
    catches="a jump host cannot reach a node",
    message="its jump host {gate} cannot reach {where}: {reason}",
    hint="correct the node's name, address or port as seen from the jump host, and check that the node is up",
    texts=("open failed: connect failed: {reason}",),
)
TOO_MANY_KEYS = Refusal(
    kind=AuthError,
    catches="ssh offers more keys than sshd accepts (MaxAuthTries)",
    message="sshd closed the connection after too many keys (offered: {tried})",
    hint="offer only the right key: set IdentitiesOnly yes and IdentityFile for the node in ~/.ssh/config",
    texts=("Too many authentication failures",),
)
SECOND_FACTOR = Refusal(
    kind=AuthError,
    catches="sshd requires a second factor",
    message="the key was accepted, but sshd also requires {methods}",
    hint=(
        "set ControlMaster auto, ControlPath ~/.ssh/cm-%C and ControlPersist 8h for the node in ~/.ssh/config, then "
        "log in once; multinode reuses that connection:\n{login} true"
    ),
)
REFUSED_KEY = Refusal(
    kind=AuthError,
    catches="a node refuses your keys",
    message="sshd refused your keys for user {user!r} (tried: {tried})",
    hint=(
        "set user= and key= in the hostfile (for a jump host: User and IdentityFile in ~/.ssh/config), or copy your "
        "key to the node:\n{copy}"
    ),
    texts=("Permission denied (...)",),
)
NO_KEY_TAKEN = Refusal(
    kind=AuthError,
    catches="sshd does not accept keys",
    message="sshd does not accept keys for user {user!r}; it requires {methods}",
    hint=(
        "allow keys in its sshd_config (PubkeyAuthentication yes), or log in once by hand: set ControlMaster auto, "
        "ControlPath ~/.ssh/cm-%C and ControlPersist 8h for the node in ~/.ssh/config, then log in; multinode reuses "
        "that connection:\n{login} true"
    ),
)
OPEN_KEY = Refusal(
    kind=AuthError,
    catches="others can read a private key, so ssh does not use it",
    message="other users can read the key {file}, so ssh does not use it",
    hint="restrict its permissions:\nchmod 600 {file}",
    texts=("Permissions ... for '{file}' are too open",),
)
LOCKED_KEY = Refusal(
    kind=AuthError,
    catches="a key has a passphrase and is not loaded",
    message="the key {file} has a passphrase",
    hint="load it into the SSH agent first:\nssh-add {file}",
)
AGENT_REFUSED = Refusal(
    kind=AuthError,
    catches="the SSH agent does not sign (the key needs confirmation or touch, or the agent is locked)",
    message="the SSH agent did not sign with a key that the node accepts: signing failed{reason}",
    hint=(
        "set ControlMaster auto, ControlPath ~/.ssh/cm-%C and ControlPersist 8h for the node in ~/.ssh/config. Then "
        "log in once by hand, and confirm or touch the key; multinode reuses that connection:\n{login} true"
    ),
    texts=("sign_and_send_pubkey: signing failed{reason}",),
)
BAD_KEY = Refusal(
    kind=AuthError,
    catches="a key file is not a private key",
    message="the key {file} is unusable: {reason}",
    hint="use the private key, not the .pub file: key= in the hostfile, or IdentityFile",
    texts=('Load key "{file}": {reason}',),
)
MAX_SESSIONS = Refusal(
    kind=ConnectError,
    catches="sshd allows no more sessions on the connection (MaxSessions)",
    message="sshd refused another session on the connection",
    hint=(
        "raise MaxSessions in its sshd_config (3 is enough), or close your own connection that has too many sessions "
        "(ControlMaster):\nssh -O exit {name}"
    ),
    texts=("Session open refused by peer", "session request failed"),
)
NO_EXEC = Refusal(
    kind=NodeFailed,
    catches="sshd runs no commands for the user (no shell, or sftp only)",
    message="sshd does not run commands: the exec request failed",
    hint=(
        "check that the user's shell exists (getent passwd USER on the node's console), and that sshd_config does not "
        "force internal-sftp"
    ),
    texts=("exec request failed",),
)
LOGIN_ENDED = Refusal(
    kind=AuthError,
    catches="sshd refuses the login (expired account, pam_access, /etc/nologin)",
    message="sshd refused the login of user {user!r}: {reason}",
    hint=(
        "look in sshd's log on the node (journalctl -u ssh) for an expired account, access rules or /etc/nologin; to "
        "use another user, set user= in the hostfile"
    ),
    texts=("Connection closed by", "Connection reset by", "Received disconnect from ... port ...:...: {reason}"),
)
SLOW_LOGIN = Refusal(
    kind=ConnectError,
    catches="a login takes too long (reverse DNS lookup or LDAP)",
    message="sshd on {where} exchanged keys but did not finish the login in time",
    hint=(
        "set UseDNS no in its sshd_config. If the login is still slow, check LDAP and other sources of accounts and "
        "keys"
    ),
)
OTHERWISE = Refusal(
    kind=ConnectError,
    catches="an SSH connection fails for another reason",
    message="no SSH connection to {where}: {reason}",
    hint="see OpenSSH's debug messages:\n{verbose} true",
)
BEYOND_FABRIC = Refusal(
    kind=ConnectError,
    catches="an SSH connection through Fabric fails for another reason",
    message="no SSH connection to {where} through Fabric: {reason}",
    hint=(
        "install the OpenSSH client, which multinode uses by default. On Debian or Ubuntu, as root:\napt-get install "
        "openssh-client"
    ),
)
SWALLOWED = Refusal(
    kind=NodeFailed,
    catches="a shell exits before it runs a command: `exit` in ~/.bashrc, or a ForceCommand",
    message=(
        "the command did not run, because a start-up script on the node prevented it (~/.bashrc, ~/.ssh/rc or a "
        "ForceCommand){printed}"
    ),
    hint=(
        "the command below must print ok immediately. If a start-up script prevents that, make the script test for a "
        "terminal first, for example with [ -t 0 ]:\n{login} echo ok"
    ),
)
SILENT = Refusal(
    kind=ContactLost,
    catches="a shell does not run a command in time: ~/.bashrc waits for input or starts another shell, or the node "
    "hangs",
    message=(
        "sshd opens sessions, but no command ran within {within_s:.0f} s. Either a start-up script on the node "
        "(~/.bashrc, ~/.ssh/rc or a ForceCommand) prevents it, or the node hangs{printed}"
    ),
    hint=(
        "the command below must print ok immediately. If a start-up script prevents that, make the script test for a "
        "terminal first, for example with [ -t 0 ]:\n{login} echo ok"
    ),
)
NO_PYTHON = Refusal(
    kind=NodeFailed,
    catches="a non-interactive shell finds no python3",
    message="the agent needs python3, but a non-interactive shell does not find it on PATH: {said}",
    hint=(
        "set python=/path/to/python3 on the node's line of the hostfile, or install python3 (Debian, Ubuntu: apt-get "
        "install python3). Then check it:\n{login} python3 -V"
    ),
)
OLD_PYTHON = Refusal(
    kind=NodeFailed,
    catches="python3 is older than 3.9",
    message="{python} is Python {version}, but the agent needs 3.9 or newer",
    hint="set a newer one on the node's line of the hostfile: python=/path/to/python3",
)
NOT_STORED = Refusal(
    kind=NodeFailed,
    catches="a home directory is full, read-only or owned by another user",
    message="the agent could not be stored in ~/{folder}: {said}",
    hint=(
        "the home directory must be writable and not full, and you must own ~/.multinode. Check this with the first "
        "command. If root owns files there, run the second command as root:\n{login} 'ls -ld ~ ~/.multinode; df -h "
        "~'\nchown -R USER ~USER/.multinode"
    ),
)
AGENT_ENDED = Refusal(
    kind=NodeFailed,
    catches="an agent exits without an answer",
    message="the agent exited with code {code} during {verb}: {said}",
    hint="check that the node runs commands:\n{login} python3 -V",
)
REFUSALS = tuple(refusal for refusal in list(globals().values()) if isinstance(refusal, Refusal))
"""In the order of matching OpenSSH's output: the first match counts."""

NEW_ALLOCATION = "make a new allocation: salloc, or multinode submit"
"""The hint where a job holds no nodes."""
# src/common/slurm_errno.c of Slurm 22.05 to 24.11.
SLURM_REFUSALS = (
    Refusal(
        kind=NodeGone,
        catches="a Slurm job has ended",
        message="Slurm job {job} has ended and released its nodes",
        hint=NEW_ALLOCATION,
        texts=("invalid job id", "already complet...", "unable to confirm allocation", "has expired", "revoked"),
    ),
    Refusal(
        kind=NodeFailed,
        catches="a node does not belong to the Slurm job",
        message="this node does not belong to Slurm job {job}, or no longer does",
        hint="list the job's nodes and their states: squeue --job {job}; sinfo -N -l",
        texts=("node configuration is not available", "invalid node name", "not in this job"),
    ),
    Refusal(
        kind=NodeFailed,
        catches="Slurm does not allow you to start a step",
        message="Slurm does not allow you to start a step in job {job}",
        hint="check that it is your own job, and that munge runs on every node",
        texts=("permission denied", "invalid user", "credential..."),
    ),
    Refusal(
        kind=NodeFailed,
        catches="a Slurm job has reached its step limit",
        message="Slurm job {job} has reached its step limit (MaxStepCount)",
        hint=NEW_ALLOCATION,
        texts=("step limit",),
    ),
    Refusal(
        kind=ConnectError,
        catches="slurmctld does not answer",
        message="slurmctld does not answer, so multinode cannot start a job step",
        hint="check whether slurmctld is running: scontrol ping",
        texts=("contact slurm controller", "contacting slurm...", "connection refused", "connection timed out"),
    ),
)
"""Why no step starts, by what srun prints; the first match counts."""


def find_refusal(words: str, among: Sequence[Refusal] = REFUSALS) -> tuple[Refusal, dict[str, str]] | None:
    """The first reason in the output of OpenSSH's client or srun, with its values; None if there is none."""
    from multinode.text_pattern import find_first

    return find_first(among, words)


def of_jump_host(error: MultinodeError, gate: Node, node: Node) -> MultinodeError:
    """The failure of a jump host, as an error of the node behind it."""
    message = f"its jump host {gate.name}: {error.message}"
    return type(error)(message, node=node.name, ran=error.ran, hint=error.hint_lines)


def copy_command(node: Node) -> str:
    """The command that installs our key on a node, with the options of its line."""
    options = {"-F": node.ssh_config, "-p": node.port, "-i": node.key}
    words = [str(word) for option in options.items() if option[1] is not None for word in option]
    return shlex.join(
        ["ssh-copy-id", *words, *(["-o", f"ProxyJump={node.jump}"] if node.jump else []), destination(node)]
    )


def _login(node: Node, *options: str) -> str:
    program, *words = ssh_words(node, "ssh")
    return shlex.join([program, *words, *options, destination(node)])
