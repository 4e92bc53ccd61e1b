"""What OpenSSH users have: set-ups in which plain `ssh` works have to work, and each refusal names its own cause.

Every condition has a real sshd. One that is refused is changed as its hint says, and then has to work.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from multinode.cluster.cluster import Node
from multinode.errors import MultinodeError
from multinode.launch.node_runs import NodeRuns
from multinode.transport.agent import AgentTransport
from multinode.transport.fabric_ssh import FabricTransport
from multinode.transport.openssh import OpensshTransport
from tests.warm import free_port

from .sshd import Sshd, make_key, started

DEADLINE_S = 20.0
BOTH = ("openssh", "fabric")
OPENSSH = ("openssh",)


class Case:
    """An sshd, and a node in a hostfile that leads to it."""

    def __init__(self, folder: Path, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others = set(psutil.Process().children())
        self.folder = folder
        self.transport = transport
        self.monkeypatch = monkeypatch
        self.places = contextlib.ExitStack()
        # A path of a socket may not be longer than 107 bytes.
        self.short = Path(self.places.enter_context(tempfile.TemporaryDirectory(prefix="c", dir="/tmp")))
        self.here = contextlib.ExitStack()
        (folder / "sshd").mkdir()
        self.sshd = Sshd(folder / "sshd", free_port())
        self.known = self.sshd.known_hosts_line  # known_hosts
        # lines of the SSH configuration, behind `Host box`
        self.config = f"IdentityFile {self.sshd.folder / 'user_key'}\nIdentitiesOnly yes\n"
        self.options: dict[str, object] = {}
        self.error = MultinodeError("none")  # what the node was refused with
        self.patience_s = 8.0
        self.connect_timeout_s = 10.0
        self.kept: OpensshTransport | FabricTransport | None = None
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        monkeypatch.setenv("HOME", str(folder))

    def serve(self, settings: str = "") -> None:
        """Start sshd, or start it anew, with these lines in its configuration."""
        self.here.close()
        self.here.enter_context(started(self.sshd, settings))

    def path(self, name: str, text: str | None = None) -> Path:
        path = self.folder / name
        if text is not None:
            path.write_text(text)
        return path

    def node(self) -> Node:
        """The node, its SSH configuration written anew."""
        known = self.path("known_hosts")
        if not known.exists():
            known.write_text(self.known)
        where = f"HostName 127.0.0.1\nPort {self.sshd.port}\nUser {self.sshd.user}\n"
        text = f"Host box\n{self.config}\n{where}UserKnownHostsFile {known}\n"
        node = Node(name="box", ssh_config=str(self.path("ssh_config", text)))
        return replace(node, **self.options)

    def bashrc(self, text: str) -> None:
        (self.sshd.home / ".bashrc").write_text(text)

    def agent(self, *keys: Path) -> None:
        """An SSH agent that holds these keys."""
        sock = self.folder / "agent"
        process = subprocess.Popen(["ssh-agent", "-D", "-a", str(sock)], stdout=subprocess.DEVNULL)
        self.places.callback(process.wait)
        self.places.callback(process.terminate)
        while not sock.exists():
            time.sleep(0.01)
        self.monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], check=True, timeout=DEADLINE_S, capture_output=True)

    def lock(self, key: Path) -> None:
        """Protect a key by a passphrase, which ssh-add is told."""
        subprocess.run(["ssh-keygen", "-q", "-p", "-N", "words", "-f", str(key)], check=True, capture_output=True)
        asks = self.path("asks", "#!/bin/sh\necho words\n")
        asks.chmod(0o755)
        self.monkeypatch.setenv("SSH_ASKPASS", str(asks))
        self.monkeypatch.setenv("SSH_ASKPASS_REQUIRE", "force")

    def sign(self, key: Path, *options: str) -> None:
        """Certify a key by a CA of the test, whose key is `ca`."""
        ca = self.path("ca")
        if not ca.exists():
            make_key(ca)
        subprocess.run(["ssh-keygen", "-q", "-s", str(ca), "-I", "t", *options, str(key)], check=True)

    def hint_command(self) -> str:
        """The last command of the hint, as it is typed; a question of ssh is answered with yes."""
        return self.error.hint_lines[-1].replace("StrictHostKeyChecking=ask", "StrictHostKeyChecking=accept-new")

    def apply(self) -> None:
        """Type it."""
        command = self.hint_command()
        done = subprocess.run(
            ["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, (command, done.stderr)

    def ask(self) -> None:
        """The node is asked, and answers."""
        node = self.node()
        transport = self.make()
        agent = AgentTransport(transport, patience_s=self.patience_s)
        try:
            request = {"schema": 1, "run_id": "none"}
            assert not agent.call(node, "runs", request, NodeRuns, deadline_s=DEADLINE_S).runs
        finally:
            agent.close()
            transport.close()

    def make(self) -> OpensshTransport | FabricTransport:
        kind = OpensshTransport if self.transport == "openssh" else FabricTransport
        return kind(connect_timeout_s=self.connect_timeout_s)

    def close(self) -> None:
        self.here.close()
        self.places.close()
        # Zombies count: what nobody waited for Python tells of during some later test.
        assert set(psutil.Process().children()) <= self.others


Works = Callable[[Case], None]
Refused = Callable[[Case], Iterator[None]]
WORKS: list[tuple[Works, str]] = []
REFUSED: list[tuple[Refused, str, str]] = []


def works(*transports: str) -> Callable[[Works], Works]:
    def keep(condition: Works) -> Works:
        WORKS.extend((condition, transport) for transport in transports)
        return condition

    return keep


def refused(words: str, *transports: str) -> Callable[[Refused], Refused]:
    def keep(condition: Refused) -> Refused:
        REFUSED.extend((condition, words, transport) for transport in transports)
        return condition

    return keep


# Host keys.


@works(*OPENSSH)
def a_ca_line_for_another_host(case: Case) -> None:
    make_key(case.path("ca"))
    case.known = f"@cert-authority *.corp.example {case.path('ca.pub').read_text()}{case.known}"


@works(*OPENSSH)
def a_broken_line_for_another_host(case: Case) -> None:
    case.known = f"other ssh-ed25519 AAAAC3Nza\n\n# words\n{case.known}"


@works(*OPENSSH)
def a_wildcard_in_known_hosts(case: Case) -> None:
    case.known = case.known.replace("127.0.0.1", "127.0.0.*")


@works(*OPENSSH)
def a_star_in_known_hosts(case: Case) -> None:
    case.known = "* " + case.known.split(" ", 1)[1]


@works(*OPENSSH)
def a_host_key_alias(case: Case) -> None:
    case.known = "gpu-one " + case.known.split(" ", 1)[1]
    case.config += "HostKeyAlias gpu-one\n"


@works(*OPENSSH)
def accept_new(case: Case) -> None:
    case.known = ""
    case.config += "StrictHostKeyChecking accept-new\n"


@works(*OPENSSH)
def no_check_and_no_file(case: Case) -> None:
    case.config += "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"


@works(*OPENSSH)
def a_host_certificate(case: Case) -> None:
    case.sign(case.sshd.folder / "host_key.pub", "-h", "-n", "127.0.0.1")
    case.serve(f"HostCertificate {case.sshd.folder / 'host_key-cert.pub'}")
    case.known = f"@cert-authority * {case.path('ca.pub').read_text()}"


@works(*OPENSSH)
def the_systems_known_hosts(case: Case) -> None:
    case.config += f"GlobalKnownHostsFile {case.path('system', case.known)}\n"
    case.known = ""


@works(*BOTH)
def a_second_known_hosts_file(case: Case) -> None:
    case.config += f"UserKnownHostsFile {case.path('first', '')} {case.path('second', case.known)}\n"


@works(*BOTH)
def a_hashed_line(case: Case) -> None:
    case.path("known_hosts", case.known)
    subprocess.run(["ssh-keygen", "-H", "-f", str(case.path("known_hosts"))], check=True, capture_output=True)


@refused("its host key is unknown .*SHA256", *BOTH)
def an_unknown_host_key(case: Case) -> Iterator[None]:
    case.known = ""
    yield
    case.apply()


@refused("its host key has changed: it presents SHA256:.*known_hosts has SHA256", *BOTH)
def a_changed_host_key(case: Case) -> Iterator[None]:
    make_key(case.path("other"))
    case.known = f"[127.0.0.1]:{case.sshd.port} {case.path('other.pub').read_text()}"
    yield
    case.apply()


@refused("its host key was revoked", *OPENSSH)
def a_revoked_host_key(case: Case) -> Iterator[None]:
    case.known += "@revoked * " + case.known.split(" ", 1)[1]
    yield
    case.path("known_hosts", case.known.splitlines()[0] + "\n")


@refused("its host key was revoked", *OPENSSH)
def a_host_key_that_a_file_revokes(case: Case) -> Iterator[None]:
    before = case.config
    case.config += f"RevokedHostKeys {case.sshd.folder / 'host_key.pub'}\n"
    yield
    case.config = before


@refused("the SSH configuration stores no keys", *OPENSSH)
def a_host_key_that_is_kept_nowhere(case: Case) -> Iterator[None]:
    before, case.known = case.config, ""
    case.config += "UserKnownHostsFile /dev/null\n"
    yield
    case.config = before
    case.node()
    case.apply()


@refused("its host certificate is invalid: .*expired", *OPENSSH)
def a_host_certificate_that_has_expired(case: Case) -> Iterator[None]:
    case.sign(case.sshd.folder / "host_key.pub", "-h", "-n", "127.0.0.1", "-V", "20200101:20200102")
    case.serve(f"HostCertificate {case.sshd.folder / 'host_key-cert.pub'}")
    case.known = f"@cert-authority * {case.path('ca.pub').read_text()}"
    yield
    case.sign(case.sshd.folder / "host_key.pub", "-h", "-n", "127.0.0.1")
    case.serve(f"HostCertificate {case.sshd.folder / 'host_key-cert.pub'}")


# Our keys.


@works(*OPENSSH)
def a_locked_key_in_the_agent_with_identities_only(case: Case) -> None:
    case.lock(case.sshd.folder / "user_key")
    case.agent(case.sshd.folder / "user_key")


@works(*OPENSSH)
def an_agent_that_the_configuration_names(case: Case) -> None:
    case.agent(case.sshd.folder / "user_key")
    case.config = f"IdentityAgent {os.environ['SSH_AUTH_SOCK']}\n"
    case.monkeypatch.delenv("SSH_AUTH_SOCK")


@works(*OPENSSH)
def a_certificate_in_another_folder(case: Case) -> None:
    case.sign(case.sshd.folder / "user_key.pub", "-n", case.sshd.user)
    case.path("certs").mkdir()
    shutil.move(case.sshd.folder / "user_key-cert.pub", case.path("certs/user.pub"))
    (case.sshd.folder / "authorized_keys").write_text("")
    case.serve(f"TrustedUserCAKeys {case.path('ca.pub')}")
    case.config += f"CertificateFile {case.path('certs/user.pub')}\n"


@works(*BOTH)
def a_key_file_that_is_missing_before_the_right_one(case: Case) -> None:
    case.config = f"IdentityFile {case.path('gone')}\n{case.config}"


@works(*BOTH)
def an_agent_that_is_gone(case: Case) -> None:
    case.monkeypatch.setenv("SSH_AUTH_SOCK", str(case.path("no-agent")))


@works(*BOTH)
def an_rsa_key_of_the_hostfile(case: Case) -> None:
    make_key(case.path("rsa"), "rsa")
    shutil.copy(case.path("rsa.pub"), case.sshd.folder / "authorized_keys")
    case.config = ""
    case.options = {"key": str(case.path("rsa"))}


@works(*OPENSSH)
def an_included_file_and_an_alias(case: Case) -> None:
    case.config = f"Include {case.path('more', case.config)}\n"


@works(*OPENSSH)
def a_setting_that_only_another_system_knows(case: Case) -> None:
    case.config = f"IgnoreUnknown UseKeychain\nUseKeychain yes\n{case.config}"


@works(*OPENSSH)
def settings_that_are_for_a_person(case: Case) -> None:
    touched = case.path("touched")
    case.config += (
        f"RemoteCommand cat\nRequestTTY force\nEscapeChar ~\nPermitLocalCommand yes\nLocalCommand touch {touched}\n"
        f"LocalForward 127.0.0.1:{case.sshd.port} 127.0.0.1:1\nExitOnForwardFailure yes\nForwardAgent yes\n"
        "LogLevel QUIET\nSessionType none\nStdinNull yes\nForkAfterAuthentication yes\nVisualHostKey yes\n"
        f"ControlMaster auto\nControlPath {case.short / 'cm-%C'}\nControlPersist yes\n"
    )
    case.places.callback(lambda: assert_gone(touched, *case.short.glob("cm-*")))


def assert_gone(*paths: Path) -> None:
    assert [path for path in paths if path.exists()] == []


@works(*OPENSSH)
def a_connection_that_the_user_holds(case: Case) -> None:
    """The only way in: no key is left that would do. It goes on afterwards."""
    case.config += f"ControlPath {case.short / 'cm-%C'}\n"
    hold(case)
    (case.sshd.folder / "authorized_keys").write_text("")


def hold(case: Case) -> None:
    """Log in by hand, and keep the connection, as a person with two factors does."""
    master = ["ssh", "-F", str(case.node().ssh_config), "box"]
    subprocess.run([*master[:3], "-fNM", "box"], check=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S)

    def end() -> None:
        subprocess.run([*master[:3], "-O", "exit", "box"], check=True, capture_output=True, timeout=DEADLINE_S)

    case.places.callback(end)


@refused("sshd refused your keys for user '.*tried: .*user_key", *BOTH)
def a_key_that_is_not_authorised(case: Case) -> Iterator[None]:
    authorised = case.sshd.folder / "authorized_keys"
    text = authorised.read_text()
    authorised.write_text("")
    yield
    assert case.hint_command().startswith("ssh-copy-id ")
    # What that command does, where there is another way in.
    authorised.write_text(text)


@refused("other users can read", *OPENSSH)
def a_key_that_others_can_read(case: Case) -> Iterator[None]:
    (case.sshd.folder / "user_key").chmod(0o644)
    yield
    case.apply()


@refused("has a passphrase", *BOTH)
def a_locked_key(case: Case) -> Iterator[None]:
    if case.transport == "fabric":
        case.config = case.config.replace("IdentitiesOnly yes", "IdentitiesOnly no")
    case.lock(case.sshd.folder / "user_key")
    case.agent()
    yield
    case.apply()


@refused("user_key.bad is unusable", *OPENSSH)
def a_file_that_is_no_key(case: Case) -> Iterator[None]:
    (case.sshd.folder / "user_key.bad").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nbad\n")
    (case.sshd.folder / "user_key.bad").chmod(0o600)
    case.config, before = f"IdentityFile {case.sshd.folder / 'user_key.bad'}\nIdentitiesOnly yes\n", case.config
    yield
    case.config = before


@refused("closed the connection after too many keys", *OPENSSH)
def more_keys_than_sshd_lets_try(case: Case) -> Iterator[None]:
    for number in range(3):
        make_key(case.path(f"key{number}"))
    case.agent(*(case.path(f"key{number}") for number in range(3)))
    case.serve("MaxAuthTries 2")
    before, case.config = case.config, f"IdentityFile {case.sshd.folder / 'user_key'}\n"
    yield
    case.config = before


@refused("the key was accepted, but sshd also requires keyboard-interactive", *BOTH)
def a_second_factor(case: Case) -> Iterator[None]:
    second = "UsePAM yes\nKbdInteractiveAuthentication yes\nAuthenticationMethods publickey,keyboard-interactive\n"
    case.serve(second)
    yield
    # The second factor is given once, by hand; here sshd does without it for that moment.
    case.serve()
    case.config += f"ControlPath {case.short / 'cm-%C'}\n"
    hold(case)
    case.transport = "openssh"
    (case.sshd.folder / "authorized_keys").write_text("")


@refused("sshd does not accept keys for user", *OPENSSH)
def an_sshd_that_takes_no_keys(case: Case) -> Iterator[None]:
    case.serve("PubkeyAuthentication no\nPasswordAuthentication yes")
    yield
    case.serve("PubkeyAuthentication yes")


@refused("sshd refused the login of user", *OPENSSH)
def an_sshd_that_ends_the_login(case: Case) -> Iterator[None]:
    case.serve(f"LoginGraceTime 1\n{slow_keys(case, 5)}")
    yield
    case.serve()


@refused("exchanged keys but did not finish the login in time", *OPENSSH)
def a_login_that_takes_too_long(case: Case) -> Iterator[None]:
    case.connect_timeout_s = 0.7
    case.serve(slow_keys(case, 10))
    yield
    case.serve()


@works(*BOTH)
def a_login_that_takes_long(case: Case) -> None:
    case.serve(slow_keys(case, 3))


def slow_keys(case: Case, seconds: int) -> str:
    """sshd asks a program for the keys, as it does with LDAP, and that takes so long."""
    program = Path("/run/sshd") / f"keys-{case.sshd.port}"
    program.write_text(f"#!/bin/sh\nsleep {seconds}\ncat {case.sshd.folder / 'authorized_keys'}\n")
    program.chmod(0o755)
    case.places.callback(program.unlink)
    return f"AuthorizedKeysFile none\nAuthorizedKeysCommand {program}\nAuthorizedKeysCommandUser root"


# The way to sshd.


@refused("no SSH connection to 127.0.0.1 port .*: refused", *BOTH)
def a_port_where_nothing_listens(case: Case) -> Iterator[None]:
    case.options = {"port": free_port()}
    yield
    case.options = {"port": case.sshd.port}


# Where no name server is reached, nobody can say that there is no such name.
@refused("(the name 'no-such-node.invalid' does not resolve|could not resolve 'no-such-node.invalid')", *BOTH)
def a_name_that_does_not_resolve(case: Case) -> Iterator[None]:
    before = case.config
    case.config += "HostName no-such-node.invalid\n"
    yield
    case.config = before


@refused("the port accepts connections, but sshd does not answer in time", *BOTH)
def a_port_that_says_nothing(case: Case) -> Iterator[None]:
    case.connect_timeout_s = 1.0
    listener = case.places.enter_context(socket.create_server(("127.0.0.1", 0)))
    case.options = {"port": listener.getsockname()[1]}
    yield
    case.connect_timeout_s, case.options = 10.0, {}


@refused("something other than sshd listens there", *OPENSSH)
def a_web_server(case: Case) -> Iterator[None]:
    case.connect_timeout_s = 1.0
    listener = case.places.enter_context(socket.create_server(("127.0.0.1", 0)))
    listener.settimeout(DEADLINE_S)

    def answer() -> None:
        caller, _ = listener.accept()
        with caller:
            caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\x01\r\n")
            while caller.recv(1024):
                pass

    thread = threading.Thread(target=answer)
    thread.start()
    case.places.callback(thread.join)
    case.options = {"port": listener.getsockname()[1]}
    yield
    case.connect_timeout_s = 10.0
    case.options = {}


@refused("sshd closed it before login.*MaxStartups", *OPENSSH)
def an_sshd_without_a_place(case: Case) -> Iterator[None]:
    case.serve("MaxStartups 1:100:1\nLoginGraceTime 0")
    with contextlib.ExitStack() as places:
        while places.enter_context(socket.create_connection(("127.0.0.1", case.sshd.port))).recv(4) != b"SSH-":
            pass
        yield
    case.serve()


@works(*OPENSSH)
def a_key_exchange_that_only_ssh_knows(case: Case) -> None:
    case.serve("KexAlgorithms sntrup761x25519-sha512@openssh.com")


@refused("no key exchange method in common; sshd offers diffie-hellman-group14-sha1", *OPENSSH)
def an_old_sshd(case: Case) -> Iterator[None]:
    case.serve("KexAlgorithms diffie-hellman-group14-sha1")
    before, offer = case.config, "diffie-hellman-group14-sha1"
    case.config += f"KexAlgorithms -{offer}\n"
    yield
    case.config = f"{before}KexAlgorithms +{offer}\n"


# Jump hosts.


def gate(case: Case, name: str = "gate") -> Sshd:
    """A second sshd, and `Host gate` for it at the end of the configuration."""
    folder = case.path(name)
    folder.mkdir()
    sshd = Sshd(folder, free_port())
    # The configuration goes on with the lines of the node itself.
    case.config = (
        f"ProxyJump {name}\n{case.config}\nHost {name}\nHostName 127.0.0.1\nPort {sshd.port}\nUser {sshd.user}\n"
        f"IdentityFile {sshd.folder / 'user_key'}\nIdentitiesOnly yes\nUserKnownHostsFile {case.path('known_hosts')}\n"
        f"Host box\n"
    )
    case.known += sshd.known_hosts_line
    return sshd


@works(*BOTH)
def a_jump_host(case: Case) -> None:
    case.places.enter_context(started(gate(case)))


@refused("uses jump host gate as its own jump host", *OPENSSH)
def a_jump_host_for_all_hosts_itself_included(case: Case) -> Iterator[None]:
    """With it `ssh` waits for itself."""
    case.places.enter_context(started(gate(case)))
    before = case.config
    case.config = f"{before}Host *\nProxyJump gate\nHost box\n"
    yield
    case.config = f"{before}Host * !gate\nProxyJump gate\nHost box\n"


@works(*OPENSSH)
def two_jump_hosts_in_a_row(case: Case) -> None:
    case.places.enter_context(started(gate(case, "inner")))
    case.places.enter_context(started(gate(case, "outer")))
    case.config = case.config.replace("ProxyJump outer\nProxyJump inner", "ProxyJump outer,inner")


@works(*BOTH)
def a_jump_host_of_the_hostfile(case: Case) -> None:
    case.places.enter_context(started(gate(case)))
    case.config = case.config.replace("ProxyJump gate\n", "")
    case.options = {"jump": "gate"}


@works(*BOTH)
def a_proxy_command(case: Case) -> None:
    connect = (
        "import socket,sys,threading,os;s=socket.create_connection((sys.argv[1],int(sys.argv[2])));"
        "t=threading.Thread(target=lambda:[s.sendall(d) for d in iter(lambda:os.read(0,65536),b'')],daemon=True);"
        "t.start();[os.write(1,d) for d in iter(lambda:s.recv(65536),b'')]"
    )
    program = case.path("connect.py", connect)
    case.config += f"ProxyCommand {sys.executable} {program} %h %p\n"


@refused("its jump host gate does not forward", *OPENSSH)
def a_jump_host_that_does_not_forward(case: Case) -> Iterator[None]:
    sshd = gate(case)
    with started(sshd, "AllowTcpForwarding no"):
        yield
    case.places.enter_context(started(sshd, "AllowTcpForwarding yes"))


@refused("its jump host gate cannot reach 127.0.0.1 port .*: Connection refused", *OPENSSH)
def a_node_that_is_down_behind_its_jump_host(case: Case) -> Iterator[None]:
    case.places.enter_context(started(gate(case)))
    case.options = {"port": free_port()}
    yield
    case.options = {}


@refused(
    "its jump host gate cannot reach no-such.invalid port .*: (Name or service not known|Temporary failure)", *OPENSSH
)
def a_name_that_the_jump_host_does_not_know(case: Case) -> Iterator[None]:
    case.places.enter_context(started(gate(case)))
    before, case.config = case.config, f"HostName no-such.invalid\n{case.config}"
    yield
    case.config = before


@refused("its jump host gate: no SSH connection to 127.0.0.1 port .*: refused", *OPENSSH)
def a_jump_host_that_is_down(case: Case) -> Iterator[None]:
    sshd = gate(case)
    yield
    case.places.enter_context(started(sshd))


@refused("its jump host gate: sshd refused your keys", *OPENSSH)
def a_jump_host_that_refuses_our_key(case: Case) -> Iterator[None]:
    sshd = gate(case)
    case.places.enter_context(started(sshd))
    authorised = sshd.folder / "authorized_keys"
    text = authorised.read_text()
    authorised.write_text("")
    yield
    authorised.write_text(text)


@refused("its jump host \\S*(gate|127.0.0.1)\\S*: its host key is unknown", *BOTH)
def a_jump_host_whose_key_is_not_known(case: Case) -> Iterator[None]:
    node = case.known
    case.places.enter_context(started(gate(case)))
    case.known = node
    yield
    case.path("ssh_config")
    if case.transport == "openssh":
        case.apply()
    else:
        (case.path("known_hosts")).write_text(case.known + (case.path("gate/host_key.pub")).read_text())
        case.transport, case.config = "openssh", case.config.replace("Host gate", "Host gate\nStrictHostKeyChecking no")


# Sessions, and what begins in them.


@works(*OPENSSH)
def one_session_at_a_time(case: Case) -> None:
    case.serve("MaxSessions 1")


@refused("sshd refused another session on the connection", *BOTH)
def no_session_at_all(case: Case) -> Iterator[None]:
    case.serve("MaxSessions 0")
    yield
    case.serve("MaxSessions 3")


@refused("the command did not run.*: it printed .*Not today", *BOTH)
def a_forced_command_that_prints_a_sentence(case: Case) -> Iterator[None]:
    case.serve("ForceCommand echo Not today.")
    yield
    case.serve()


@refused("exited with code 1 during runs: This account is currently not available", *BOTH)
def an_account_that_may_not_log_in(case: Case) -> Iterator[None]:
    case.serve("ForceCommand /usr/sbin/nologin")
    yield
    case.serve()


@works(*BOTH)
def a_forced_command_that_runs_ours(case: Case) -> None:
    case.serve('ForceCommand echo hello; eval "$SSH_ORIGINAL_COMMAND"')


@works(*BOTH)
def a_banner_with_braces(case: Case) -> None:
    case.serve(f"Banner {case.path('banner', '{ welcome }' * 60)}")


PRINTS = {
    "a title": "printf '\\033]0;%s\\007' \"$HOSTNAME\"",
    "no newline": "printf 'loading... '",
    "json": """echo '{"motd": "hello"}'""",
    "a brace": "echo '{ welcome }'",
    "much": "head -c 3000000 /dev/zero | tr '\\0' 'x'",
    "stderr": "echo oops >&2; ls /no/such/file",
    "a syntax error": "if then\n",
    "another directory": "cd /; echo there",
    "LD_PRELOAD": "export LD_PRELOAD=/no/such/library.so",
}


@pytest.mark.parametrize("transport", BOTH)
@pytest.mark.parametrize("text", PRINTS.values(), ids=PRINTS.keys())
def test_a_bashrc_may_print_what_it_likes(
    text: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sshd: Sshd
) -> None:
    case = Case(tmp_path, transport, monkeypatch)
    # One sshd for all of these.
    case.sshd, case.known = sshd, sshd.known_hosts_line
    case.config = f"IdentityFile {sshd.folder / 'user_key'}\n"
    case.bashrc(f"{text}\n")
    case.places.callback((sshd.home / ".bashrc").unlink)
    with contextlib.closing(case):
        case.ask()


@refused("the command did not run", *BOTH)
def a_bashrc_that_exits(case: Case) -> Iterator[None]:
    yield from swallowed(case, "exit")


@refused("sshd opens sessions, but no command ran", *BOTH)
def a_bashrc_that_starts_another_shell(case: Case) -> Iterator[None]:
    yield from swallowed(case, "exec sh")


@refused("sshd opens sessions, but no command ran", *OPENSSH)
def a_bashrc_that_reads(case: Case) -> Iterator[None]:
    yield from swallowed(case, "read -p 'your name? ' name")


def swallowed(case: Case, text: str) -> Iterator[None]:
    case.patience_s = 2.0
    case.bashrc(f"{text}\n")
    yield
    case.patience_s = 8.0
    # Behind a test for a terminal, as the hint has it.
    case.bashrc(f"if [ -t 0 ]; then {text}; fi\n")
    case.apply()


@refused("a non-interactive shell does not find it on PATH.*not found", *BOTH)
def no_python3(case: Case) -> Iterator[None]:
    case.path("bin").mkdir()
    for name in ("sh", "mkdir", "cat"):
        case.path(f"bin/{name}").symlink_to(str(shutil.which(name)))
    case.bashrc(f"PATH={case.path('bin')}\n")
    yield
    case.options = {"python": sys.executable}
    case.bashrc("")


@refused("a non-interactive shell does not find it on PATH: pyenv: python3: command not found", *OPENSSH)
def a_shim_without_a_python(case: Case) -> Iterator[None]:
    shim(case, "echo 'pyenv: python3: command not found' >&2; exit 127")
    yield
    case.options = {"python": sys.executable}


@refused("python3 is Python 3.8.18, but the agent needs 3.9", *BOTH)
def an_old_python3(case: Case) -> Iterator[None]:
    old = "import runpy, sys; sys.version_info = (3, 8, 18); del sys.argv[0]; runpy.run_path(sys.argv[0])"
    shim(case, f"shift 2; exec {sys.executable} -I -S -c '{old}' \"$@\"")
    yield
    case.options = {"python": sys.executable}


def shim(case: Case, text: str) -> None:
    """A python3 on the node's PATH that does this."""
    case.path("bin").mkdir()
    case.path("bin/python3", f"#!/bin/sh\n{text}\n").chmod(0o755)
    case.bashrc(f"PATH={case.path('bin')}:$PATH\n")


@refused("the agent could not be stored in ~/.multinode/agent: .*(File exists|Not a directory)", *BOTH)
def a_file_in_the_place_of_our_directory(case: Case) -> Iterator[None]:
    (case.sshd.home / ".multinode").write_text("")
    yield
    (case.sshd.home / ".multinode").unlink()


@pytest.mark.parametrize(("condition", "transport"), WORKS, ids=lambda value: getattr(value, "__name__", value))
def test_a_set_up_in_which_ssh_works_works(
    condition: Works, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, transport, monkeypatch)
    with contextlib.closing(case):
        case.serve()
        condition(case)
        case.ask()


@pytest.mark.parametrize(
    ("condition", "words", "transport"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value)[:20])
)
def test_a_refusal_names_its_cause_and_its_hint_mends_it(
    condition: Refused, words: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, transport, monkeypatch)
    with contextlib.closing(case):
        case.serve()
        steps = condition(case)
        next(steps)
        with pytest.raises(MultinodeError) as caught:
            case.ask()
        case.error = caught.value
        assert re.search(words, case.error.message), case.error.message
        assert case.error.node == "box"
        assert case.error.hint_lines
        assert not re.search(r"\w+(Exception|Error)\(|<\w+ object|Traceback", f"{case.error.message} {case.error.hint}")
        assert list(steps) == []
        case.ask()


def test_what_ssh_is_started_with_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No terminal, no question, and what the node prints is not what ssh says."""
    case = Case(tmp_path, "openssh", monkeypatch)
    program = case.path("bin")
    program.mkdir()
    log = case.path("calls")
    (program / "ssh").write_text(
        f'#!/bin/sh\necho "$SSH_ASKPASS_REQUIRE $(ps -o tty= -p $$) $*" >> {log}\nexec {shutil.which("ssh")} "$@"\n'
    )
    (program / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{program}:{os.environ['PATH']}")
    with contextlib.closing(case):
        case.serve()
        case.ask()
    calls = [shlex.split(line, posix=False) for line in log.read_text().splitlines()]
    assert {call[0] for call in calls} == {"never"}
    assert {call[1] for call in calls} == {"?"}
    logins = [" ".join(call) for call in calls if "-f" in call]
    assert len(logins) == 1
    for option in ("BatchMode=yes", "ClearAllForwardings=yes", "RequestTTY=no", "EscapeChar=none", "-T", "-E"):
        assert option in logins[0]
