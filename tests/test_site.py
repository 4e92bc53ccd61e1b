"""The documentation site: it builds without network, has no dead link, and its search finds what people look for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import lunr
import pytest

_ROOT = Path(__file__).parent.parent
# Words from each thread of the language review, and where the answer is.
QUESTIONS = {
    "ZeRO-3 two nodes 10GbE 4 s/it to 90 s/it": "why-is-zero-3-on-10-gbits-ethernet-twenty-times-slower-on-two-nodes",
    "2x1 slower than 1x2": "why-are-two-nodes-with-one-gpu-each-slower-than-one-node-with-two",
    "stuck after Running training tailscale0": "why-does-it-hang-after-running-training-over-a-vpn",
    "RANK or NODE_RANK": "rank-or-node_rank",
    "Running tokenizer on dataset then timeout after 30 minutes": (
        "why-does-tokenization-end-after-30-minutes-with-a-timeout"
    ),
    "DataLoader worker killed by signal Bus error shared memory": "where-does-the-bus-error-come-from",
    "181 s/it watchdog caught collective operation timeout": ("181-sit-then-the-watchdog-ends-the-run-what-is-wrong"),
    "my calculation says bandwidth is not the bottleneck": ("by-my-calculation-the-bandwidth-is-enough-why-is-it-slow"),
    "different interface names NCCL_SOCKET_IFNAME": (
        "my-nodes-have-different-interface-names-what-is-nccl_socket_ifname"
    ),
    "random ports firewall 29500 No route to host": "connection-timed-out-which-ports-have-to-be-open",
    "gloo connects to 127.0.1.1 Connection refused": "why-does-gloo-connect-to-127011",
    "survivors hang after crash of one worker": "one-process-died-why-do-the-others-hang",
    "same s/it on two nodes is it a gain": "two-nodes-have-the-same-sit-as-one-is-that-a-gain",
    "nvidia-smi 100% utilization slow": "gpu-utilization-is-100-but-training-is-slow-why",
    "AWS 25 Gigabit slow NCCL": "my-clouds-nic-says-25-gbits-but-nccl-gets-5-why",
    "busbw above line rate": "why-is-the-bus-bandwidth-busbw-above-the-line-rate",
    "busbw decreases with more nodes": "why-does-the-bus-bandwidth-busbw-fall-with-more-nodes",
    "Avg bus bandwidth : 0 all_reduce_perf": "why-is-the-bus-bandwidth-busbw-0",
    "ib_write_bw is fast and nccl-tests is slow": "infiniband-or-roce-why-does-nccl-reach-half-of-ib_write_bw",
    "InfiniBand half the bandwidth GDRDMA": "infiniband-or-roce-why-does-nccl-reach-half-of-ib_write_bw",
    "lossless RoCE PFC ECN": "does-roce-need-a-lossless-network-pfc-ecn",
    "busbw drops for large messages on RoCE": "does-roce-need-a-lossless-network-pfc-ecn",
    "NCCL_IB_DISABLE RoCE slow": "why-does-nccl_ib_disable1-turn-roce-off",
    "upgrade network from 10GbE to 100GbE": "is-an-upgrade-to-25-40-or-100-gbits-worth-it",
    "train over WAN internet": "can-i-train-over-the-internet-wan",
    "heterogeneous cluster with different GPUs": "can-nodes-with-different-gpus-train-together",
    "same training time with 4, 8 and 16 GPUs data loading": (
        "more-gpus-take-the-same-time-is-data-loading-the-bottleneck"
    ),
    "latency many small all_reduce": "does-latency-matter-many-small-reductions",
    "zero_hpz_partition_size mics_shard_size": "zero-hpz-mics-or-hybrid-sharding-what-keeps-zero-3-within-a-node",
}
# Texts from the trackers of PyTorch, NCCL, LLaMA-Factory and DeepSpeed, then questions; and the page that answers each.
SEARCHES = {
    (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=1800000) ran for 1800041 milliseconds before timing out"
    ): "reference/troubleshooting/#collective-timeout",
    "To avoid data inconsistency, we are taking the entire process down": (
        "reference/troubleshooting/#collective-timeout"
    ),
    (
        "Timed out initializing process group in store based barrier on rank: 7, for key: store_based_barrier_key:32"
    ): "reference/troubleshooting/#not-all-joined",
    "RendezvousTimeoutError": "reference/troubleshooting/#master-unreachable",
    "RendezvousConnectionError: The connection to the C10d store has failed": (
        "reference/troubleshooting/#master-unreachable"
    ),
    "unbound_buffer.cc Timed out waiting 1800000ms for recv operation to complete": (
        "reference/troubleshooting/#gloo-timeout"
    ),
    "unhandled system error, NCCL version 2.4.8": "reference/troubleshooting/#nccl-system-error",
    "How to set NCCL_SOCKET_IFNAME": "faq/#my-nodes-have-different-interface-names-what-is-nccl_socket_ifname",
    "Multi-node training speed is slower than single-node": (
        "faq/#why-are-two-nodes-with-one-gpu-each-slower-than-one-node-with-two"
    ),
    "Training on two GPU nodes slower than that on one node": (
        "faq/#why-are-two-nodes-with-one-gpu-each-slower-than-one-node-with-two"
    ),
    "errno: 110 - Connection timed out": "faq/#connection-timed-out-which-ports-have-to-be-open",
    "Bootstrap : no socket interface found": "reference/troubleshooting/#nccl-no-interface",
    "Call to connect failed : Connection refused": "reference/troubleshooting/#nccl-refused",
    "Net : Connection closed by remote peer": "reference/troubleshooting/#nccl-peer-gone",
    "ddp_timeout LLaMA-Factory tokenizing takes longer than 30 minutes": (
        "faq/#why-does-tokenization-end-after-30-minutes-with-a-timeout"
    ),
    "Signal 9 (SIGKILL) received by PID": "reference/troubleshooting/#killed",
    "CUDA out of memory. Tried to allocate": "reference/troubleshooting/#cuda-out-of-memory",
    "EADDRINUSE address already in use 29500": "reference/troubleshooting/#nccl-rank-taken",
    "ncclInternalError: Internal check failed": "reference/troubleshooting/#nccl-internal-error",
    "DataLoader worker is killed by signal: Bus error": "reference/troubleshooting/#bus-error",
    "deepspeed hostfile slots": "reference/hostfile/#hostfiles-of-deepspeed-horovod-and-mpi",
    "Permission denied (publickey)": "reference/troubleshooting/#ssh-permission-denied",
    "Host key verification failed": "reference/troubleshooting/#ssh-host-key-unknown",
    "CUDA error: no kernel image is available for execution on the device": (
        "reference/troubleshooting/#no-kernel-image"
    ),
    "CUDA error: invalid device ordinal": "reference/troubleshooting/#invalid-device",
    "NET/IB : Got completion with error 12": "reference/troubleshooting/#nccl-ib-completion",
    "Expected to have finished reduction in the prior iteration before starting a new one": (
        "reference/troubleshooting/#ddp-unused-parameters"
    ),
    "Address family not supported by protocol": "reference/troubleshooting/#no-ipv6",
    "terminate called after throwing an instance of 'c10::DistBackendError'": "reference/troubleshooting/#connection",
    "No space left on device": "reference/troubleshooting/#disk-full",
    "iperf fast but all_reduce_perf slow 10Gbit": "faq/#iperf3-is-fast-but-training-is-slow-why",
    "Socket Timeout waiting for key default_pg store->get('0')": "reference/troubleshooting/#store-timeout",
    "train in docker containers on two machines": "how-to/nodes-of-other-kinds/#nodes-that-train-in-docker-containers",
    "conda environment on every node": "how-to/nodes-of-other-kinds/#uv-and-conda-on-the-nodes",
    "how do I copy my model to all nodes": "how-to/copy-models-and-data/",
    "training hangs, which rank is behind": "how-to/find-out-why-a-run-failed/#when-it-hangs",
    "secret HF_TOKEN environment variable on nodes": "how-to/launch-on-your-nodes/#variables-and-secrets",
    "what does exposed communication mean": (
        "how-to/see-where-the-time-goes/#what-exposed-communication-and-the-other-figures-mean"
    ),
    "resume training from checkpoint after node failure": "how-to/runs-that-survive-failures/",
    "how many repeats for a confidence interval": "explanation/uncertainty/",
    "run on a Slurm cluster with sbatch": "how-to/on-a-slurm-cluster/",
    "predict speed on another network before buying a switch": "how-to/predict-another-network/",
}
_LOOKED_AT = 5


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "0.0.9").mkdir()
    (folder / "0.0.9" / "index.html").write_text("an earlier version")
    built = build(folder)
    assert (built.returncode, built.stdout) == (0, "")
    return folder


def build(folder: Path, scripts: Path = _ROOT / "scripts") -> subprocess.CompletedProcess[str]:
    # In a network namespace of its own there is no network.
    command = ["unshare", "--net", "--map-root-user", sys.executable, str(scripts / "make_site.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def version(site: Path) -> str:
    (newest, *_) = json.loads((site / "versions.json").read_text())
    return str(newest["version"])


def documents(site: Path, language: str = "") -> list[dict[str, Any]]:
    index = json.loads((site / language / version(site) / "search" / "search_index.json").read_text())
    return list(index["docs"])


@pytest.fixture(scope="module")
def index(site: Path) -> Any:
    """As the theme's script builds it in the browser: the title before the text, and some pages before others."""
    fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text"}]
    weighted = [(one, {"boost": one.get("boost", 1)}) for one in documents(site)]
    return lunr.lunr(ref="location", fields=fields, documents=weighted)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_answers_what_people_ask(index: Any, question: str) -> None:
    assert f"docs/faq/#{QUESTIONS[question]}" in search(index, question)[:_LOOKED_AT]


@pytest.mark.parametrize("text", SEARCHES)
def test_the_search_finds_what_trackers_ask_for_first(index: Any, text: str) -> None:
    assert search(index, text)[0] == f"docs/{SEARCHES[text]}"


def search(index: Any, text: str) -> list[str]:
    # A dash before a word would exclude it.
    words = re.sub(r"(?<!\w)-|-(?!\w)|[^\w./-]+", " ", text)
    return [result["ref"] for result in index.search(words)]


def test_chinese_questions_are_found_by_their_words(site: Path) -> None:
    fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text"}]
    # The theme sets the characters of a query apart as those of the index are.
    shown = [
        {name: one[name].replace("\u200b", " ") for name in ("location", "title", "text")}
        for one in documents(site, "zh")
    ]
    index = lunr.lunr(ref="location", fields=fields, documents=shown)
    questions = re.findall(r"^## (.+)", (_ROOT / "docs" / "faq.zh-CN.md").read_text(), re.MULTILINE)
    assert len(questions) == len(re.findall(r"^## ", (_ROOT / "docs" / "faq.md").read_text(), re.MULTILINE))
    for question in questions:
        words = " ".join(re.findall("[\u4e00-\u9fff]", question))
        titles = [one["title"] for one in shown if one["location"] in [hit["ref"] for hit in index.search(words)][:3]]
        assert question.replace(" ", "") in [title.replace(" ", "") for title in titles]


def test_versions_stand_beside_each_other_and_the_newest_is_first(site: Path) -> None:
    assert [one["version"] for one in json.loads((site / "versions.json").read_text())][1:] == ["0.0.9"]
    assert f"url={version(site)}/" in (site / "index.html").read_text()


def test_pages_in_chinese_are_a_site_of_their_own_and_lead_to_each_other(site: Path) -> None:
    locations = {one["location"].partition("#")[0] for one in documents(site, "zh")}
    pages = (
        "tutorial/first-steps",
        "which-command",
        "reading-the-output",
        "faq",
        "reference/hostfile",
        "reference/troubleshooting",
    )
    guides = (
        "compare-one-node-with-many",
        "launch-on-your-nodes",
        "come-from-another-launcher",
        "train-over-slow-ethernet",
    )
    assert locations == {"", "docs/", *(f"docs/{one}/" for one in pages), *(f"docs/how-to/{one}/" for one in guides)}
    number = version(site)
    sections = re.findall(r"\n\*\*(.+)\*\*\n", (_ROOT / "docs" / "README.zh-CN.md").read_text())
    top = (site / "zh" / number / "index.html").read_text()
    # Of the third, no page is in Chinese.
    assert [one in top for one in sections] == [True, True, False]
    chinese = (site / "zh" / number / "docs" / "reference" / "troubleshooting" / "index.html").read_text()
    assert '<html lang="zh"' in chinese
    assert f"/{number}/docs/reference/checks/#rdma" in chinese
    english = (site / number / "docs" / "reference" / "troubleshooting" / "index.html").read_text()
    assert f"/zh/{number}/docs/reference/troubleshooting/" in english


def test_generated_pages_are_in_the_search(site: Path) -> None:
    locations = {one["location"] for one in documents(site)}
    assert {
        "docs/reference/cli/#multinode-export",
        "docs/reference/checks/#rdma",
        "docs/reference/schemas/summary-3/#stepsplit",
        "docs/reference/troubleshooting/#nccl-shared-memory",
    } <= locations


def test_a_dead_link_in_a_page_is_an_error(tmp_path: Path) -> None:
    """Of a small copy of the repository."""
    scripts = [f"scripts/{name}.py" for name in ("make_site", "make_contract_reference", "reference_pages")]
    for name in (*scripts, "mkdocs.yml", "LICENSE", "docs/words.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / name, path)
    (tmp_path / "docs" / "pictures").mkdir()
    (tmp_path / "docs" / "README.md").write_text("# Documentation\n\n- [Questions](faq.md)\n")
    (tmp_path / "docs" / "faq.md").write_text("# Questions\n")
    (tmp_path / "README.md").write_text("# Top\n\n[gone](docs/nowhere.md)\n[a heading](docs/faq.md#nowhere)\n")
    (tmp_path / "README.zh-CN.md").write_text("# Top\n")
    (tmp_path / "docs" / "README.zh-CN.md").write_text("# Documentation\n")
    built = build(tmp_path / "site", tmp_path / "scripts")
    assert built.returncode != 0
    assert "docs/nowhere.md" in built.stderr
    assert "faq.md#nowhere" in built.stderr


_LOADED = re.compile(r"""<(?:(?:script|img|iframe|source)\b[^>]*\ssrc|link\b[^>]*\shref)=["'](?:[a-z]+:)?//""")


def test_a_page_loads_nothing_from_outside(site: Path) -> None:
    assert _LOADED.search('<img alt="" src="https://example.com/a.png">')
    assert not [path for path in site.rglob("*.html") if _LOADED.search(path.read_text())]


def test_every_link_leads_to_a_file_also_in_the_other_language(site: Path) -> None:
    followed = set()
    for page in site.rglob("index.html"):
        for link in re.findall(r"""\s(?:href|src)=["']([^"'#:]+)["'#]""", page.read_text()):
            target = page.parent / urllib.parse.unquote(link)
            assert (target / "index.html" if target.is_dir() else target).is_file(), f"{page}: {link}"
            followed.add(target.resolve().relative_to(site).parts[0])
    assert followed == {version(site), "zh"}
