"""Files of other programs, given as a hostfile."""

from __future__ import annotations

import pytest

from multinode.cluster.inventory import is_inventory
from multinode.errors import HostfileError
from multinode.records.other_documents import refuse_other_documents

# As its ClusterManager writes one (github.com/scitrera/sparkrun, core/cluster_manager.py).
SPARKRUN = """\
name: mylab
hosts:
- 192.168.11.13
- 192.168.11.14
description: My DGX Spark lab
user: dgx
"""
SPARKRUN_RECIPE = """\
model: org/Model-30B
runtime: vllm
min_nodes: 2
defaults:
  port: 8000
  tensor_parallel: 1
command: |
  vllm serve {model} -tp {tensor_parallel}
"""
SSH = """\
# the cluster
ServerAliveInterval 60
Host gpu-0 gpu0
    HostName 192.0.2.10
    User alice

host gpu-1
    HostName 192.0.2.11

Host gpu-* !gpu-9
    IdentityFile ~/.ssh/cluster
"""
EXAMPLE = "write one node per line, for example: node1 slots=2"


def complaint(text: str, source: str = "given") -> HostfileError:
    with pytest.raises(HostfileError) as caught:
        refuse_other_documents(text, source)
    return caught.value


def test_an_ssh_configuration_is_answered_with_its_aliases() -> None:
    error = complaint(SSH, "my config")
    assert str(error) == "my config:3: it is an SSH configuration"
    assert error.hint == (
        "write one node per line: gpu-0 ssh_config='my config', then gpu0 ssh_config='my config', and so on; without "
        "ssh_config=, multinode reads ~/.ssh/config"
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (SPARKRUN, "write one node per line: 192.168.11.13 user=dgx, then 192.168.11.14 user=dgx"),
        (SPARKRUN_RECIPE, EXAMPLE),
        ("model_name_or_path: m\nstage: sft\n", EXAMPLE),
        ("cluster:\n  nodes: [a, b]\n", EXAMPLE),
        ("nodes: [a, b, c]\n", "write one node per line: a, then b, and so on"),
        ("---\n- a\n- b\n", "write one node per line: a, then b"),
        ('hosts:\n- "a\\e[1m"\n- b\n', "write one node per line: a [1m, then b"),
    ],
)
def test_other_yaml_is_no_inventory(text: str, hint: str) -> None:
    error = complaint(text)
    assert str(error) == "given: it is YAML, but not an Ansible inventory: it has no groups with hosts"
    assert error.hint == hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"nodes": ["a", "b"], "port": 2222}', "write one node per line: a port=2222, then b port=2222"),
        ('["a", "b"]', "write one node per line: a, then b"),
        ('\n[\n  {"host": "a"}\n]\n', EXAMPLE),
        ('{"a": {"ip": "10.0.0.1", "gpus": 8}}', EXAMPLE),
        ("{}", EXAMPLE),
    ],
)
def test_other_json_is_not_read(text: str, hint: str) -> None:
    error = complaint(text)
    assert str(error) == ("given: it is JSON, but not output of ansible-inventory --list: it has no groups with hosts")
    assert error.hint == hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node1 slots=2\n",
        "host slots=2\nhostname\n",
        "[1,3]\n",
        "[2001:db8::1] slots=2\n",
        # Inventories.
        "[gpu]\nn1\n",
        "all:\n  hosts:\n    n1:\n    n2:\n",
        "---\ngpu:\n  children:\n    a100:\nungrouped:\n",
        "gpu:\n  hosts:\n    n1:\n      secret: !vault |\n        $ANSIBLE_VAULT\n",
        "plugin: amazon.aws.aws_ec2\nregions:\n  - us-east-1\n",
        '{"_meta": {"hostvars": {}}, "all": {"children": ["gpu"]}}',
        '{"gpu": {"hosts": ["n1"]}}',
        # Broken ones: their reader says where.
        "gpu:\n  hosts: [\n",
        '{"gpu": ',
    ],
)
def test_hostfiles_and_inventories_are_left_to_their_readers(text: str) -> None:
    refuse_other_documents(text, "given")


def test_what_is_refused_would_be_taken_for_an_inventory() -> None:
    assert is_inventory(SPARKRUN)
