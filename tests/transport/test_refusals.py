"""What OpenSSH's client and srun print, and the reason that is found in it."""

from __future__ import annotations

from collections.abc import Sequence

from multinode.transport.refusals import REFUSALS, SLURM_REFUSALS, Refusal, find_refusal
from tests.golden import Golden

# As OpenSSH 9.2 prints them; `ssh_exchange_identification` is of 7.9, the penalties of a source are of 9.8.
OPENSSH = """\
ssh: Could not resolve hostname box: Temporary failure in name resolution
ssh: Could not resolve hostname box: Name or service not known
hostname contains invalid characters
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@       WARNING: REVOKED HOST KEY DETECTED!               @
Host key ED25519 SHA256:Aa revoked by file /etc/ssh/revoked
ED25519 host key for box was revoked and you have requested strict checking.
Host key verification failed.
No ED25519 host key is known for box and you have requested strict checking.
Unable to negotiate with 10.0.0.1 port 22: no matching host key type found. Their offer: ssh-rsa,ssh-dss
kex_exchange_identification: banner line contains invalid characters
Bad remote protocol version identification: 'x'
Protocol major versions differ: 2 vs. 1
ssh_dispatch_run_fatal: Connection to 10.0.0.1 port 22: invalid format
kex_exchange_identification: Connection closed by remote host
kex_exchange_identification: read: Connection reset by peer
ssh_exchange_identification: Connection closed by remote host
kex_exchange_identification: banner line 0: Exceeded MaxStartups
kex_exchange_identification: banner line 0: Not allowed at this time
Connection timed out during banner exchange
Connection to 10.0.0.1 port 22 timed out
ssh: connect to host 10.0.0.1 port 22: Connection refused
ssh: connect to host 10.0.0.1 port 22: Connection timed out
ssh: connect to host 10.0.0.1 port 22: Operation timed out
ssh: connect to host fe80::1%eth0 port 22: No route to host
ssh: connect to host 10.0.0.1 port 22: Network is unreachable
ssh: connect to host 10.0.0.1 port 22: Host is down
channel 0: open failed: administratively prohibited: open failed
channel 0: open failed: connect failed: Name or service not known
Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures
user@box: Permission denied (publickey,password).
Permissions 0644 for '/home/a b/.ssh/id' are too open.
sign_and_send_pubkey: signing failed for ED25519 "/home/a/.ssh/id" from agent: agent refused operation
sign_and_send_pubkey: signing failed: agent refused operation
sign_and_send_pubkey: no mutual signature supported
Load key "/home/a/.ssh/id.pub": error in libcrypto
mux_client_request_session: session request failed: Session open refused by peer
exec request failed on channel 0
Connection closed by 10.0.0.1 port 22
Connection reset by 10.0.0.1 port 22
Received disconnect from ::1 port 2222:11: Your account has expired
client_loop: send disconnect: Broken pipe
"""
# As in src/common/slurm_errno.c of Slurm 22.05 to 24.11.
SRUN = """\
srun: error: Unable to confirm allocation for job 7: Invalid job id specified
srun: error: Unable to create step for job 7: Job/step already completing or completed
srun: error: Unable to create step for job 7: Requested node configuration is not available
srun: error: Unable to create step for job 7: Invalid node name specified
srun: error: Unable to create step for job 7: Step limit reached for this job
srun: error: Unable to create step for job 7: Access/permission denied
srun: error: Unable to create step for job 7: Invalid user id
srun: error: Task launch for StepId=7.0 failed on node n1: Invalid job credential
srun: error: Task launch for StepId=7.0 failed on node n1: Job credential revoked
slurm_load_jobs error: Unable to contact slurm controller (connect failure)
srun: error: Unable to allocate resources: Connection refused
srun: error: task 0 launch failed: Unspecified error
"""


def found_in(lines: str, among: Sequence[Refusal]) -> str:
    text = ""
    for line in lines.splitlines():
        refusal, values = find_refusal(line, among) or (None, {})
        named = "".join(f"\n  {name} = {value}" for name, value in values.items())
        text += f"{line}\n  > {refusal.catches if refusal is not None else 'nothing'}{named}\n"
    return text


def test_each_line_of_ssh_and_srun_names_its_reason_and_values(golden: Golden) -> None:
    golden.check("refusals_openssh.txt", found_in(OPENSSH, REFUSALS))
    golden.check("refusals_srun.txt", found_in(SRUN, SLURM_REFUSALS))


def test_the_reason_that_stands_first_in_the_catalogue_counts() -> None:
    lines = OPENSSH.splitlines()
    assert find_refusal("\n".join(reversed(lines))) == find_refusal(lines[0])
