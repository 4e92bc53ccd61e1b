"""The failures whose logs are kept in tests/gpu/h100/failures.jsonl: what each rank of two runs after the prelude.

All of it under torchrun on one GPU: NCCL takes the ranks for two hosts, but for the cases that need it not to. Some
fail without a GPU for the same reason.
"""

from __future__ import annotations

from typing import NamedTuple

_PRELUDE = """\
import os, sys, io, time
R = int(os.environ["RANK"])
os.environ.setdefault("NCCL_HOSTID", str(R)); os.environ.setdefault("NCCL_NET", "Socket")
{environment}
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
d = "cuda:0" if torch.cuda.is_available() else "cpu"
def nccl(**options):
    if d == "cpu":
        options.pop("device_id", None); dist.init_process_group("gloo", **options)
    else:
        dist.init_process_group("nccl", **options)
def sync():
    if d != "cpu": torch.cuda.synchronize()
def kernel(source, name, grid, block, arguments, **options):
    f = torch.cuda._compile_kernel(source, name, **options)
    f(grid, block, arguments); sync()
def ones(): dist.all_reduce(torch.ones(4, device=d)); sync()
"""
_KERNEL = (
    "kernel('extern \"C\" __global__ void k(float* p){{ {0} }}', 'k', (1,1,1), ({1},1,1), [torch.zeros(4,device=d)])"
)
_ON_GPU = """
class D(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.ones(2, device=d) * i
torch.ones(1, device=d)
for b in DataLoader(D(), num_workers=2, pin_memory={pins}): print(b)
"""


class Provoked(NamedTuple):
    """A failure."""

    script: str
    needs_gpu: bool = True  # otherwise it fails for the same reason on a CPU, with gloo


def _script(body: str, **environment: str) -> Provoked:
    variables = "; ".join(f"os.environ[{name!r}] = {value!r}" for name, value in environment.items())
    return Provoked(_PRELUDE.format(environment=variables) + body + "\n")


def _anywhere(body: str, **environment: str) -> Provoked:
    return _script(body, **environment)._replace(needs_gpu=False)


PROVOKED: dict[str, Provoked] = {
    "alloc-conf": _script("torch.zeros(1,device=d)", PYTORCH_CUDA_ALLOC_CONF="max_split_size:1"),
    "anomaly": _anywhere(
        "torch.autograd.set_detect_anomaly(True)\n"
        "x=torch.zeros(2,device=d,requires_grad=True); (torch.sqrt(x)*0).sum().backward()"
    ),
    "bad-visible": _script("torch.zeros(3,device='cuda')", CUDA_VISIBLE_DEVICES="7"),
    "barrier-device": _script(
        "torch.cuda.set_device(0); nccl(); dist.barrier(); dist.all_reduce(torch.ones(4,device='cuda:1'))"
    ),
    "checkpoint-device": _script(
        "b=io.BytesIO(); torch.save(torch.ones(2,device=d),b)\n"
        "torch.load(io.BytesIO(b.getvalue()), map_location='cuda:1')"
    ),
    "compile-error": _anywhere(
        "@torch.compile(fullgraph=True)\ndef f(x):\n    print('break', x.sum().item()); return x+1\n"
        "f(torch.randn(4,device=d))"
    ),
    "compile-no-gcc": _anywhere(
        "torch.compile(lambda x: torch.softmax(x,-1)*2)(torch.randn(64,64,device=d))", PATH="/nowhere", CC=""
    ),
    "cpu-tensor-nccl": _script("nccl(device_id=torch.device(d)); dist.all_reduce(torch.ones(4))"),
    "cudnn-memory": _script(
        "x=[torch.empty(torch.cuda.mem_get_info()[0]-(64<<20),dtype=torch.uint8,device=d)]\n"
        "c=nn.Conv2d(64,64,3).to(d); i=torch.randn(32,64,256,256,device=d)\nc(i).sum().item()"
    ),
    "ddp-shapes": _anywhere(
        "nccl(); m=nn.parallel.DistributedDataParallel(nn.Linear(4+R,4).to(d)); "
        "m(torch.randn(2,4+R,device=d)).sum().backward()"
    ),
    "ddp-unused": _anywhere(
        "nccl()\nclass M(nn.Module):\n    def __init__(self):\n        super().__init__(); self.a=nn.Linear(4,4); "
        "self.b=nn.Linear(4,4)\n    def forward(self,x): return self.a(x)\n"
        "m=nn.parallel.DistributedDataParallel(M().to(d))\n"
        "for _ in range(3): m(torch.randn(2,4,device=d)).sum().backward()"
    ),
    "device-ordinal": _script("torch.cuda.set_device(3)"),
    "dtype": _anywhere("nn.Linear(4,4).to(d).bfloat16()(torch.randn(2,4,device=d))"),
    "duplicate-gpu": _script("nccl(); ones()", NCCL_HOSTID="same"),
    "embedding-index": _anywhere(
        "e=nn.Embedding(10,4).to(d); e(torch.tensor([3,12],device=d)).sum().backward(); sync()"
    ),
    "expandable-oom": _script(
        "x=[torch.zeros(1<<32,device=d) for _ in range(99)]", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
    ),
    "fork": _script(_ON_GPU.format(pins=False)),
    "fraction-oom": _script(
        "torch.cuda.set_per_process_memory_fraction(0.01); x=[torch.zeros(1<<26,device=d) for _ in range(99)]"
    ),
    "fsdp-oom": _script(
        "from torch.distributed.fsdp import fully_shard\nnccl(device_id=torch.device(d))\n"
        "m=nn.Sequential(*[nn.Linear(30000,30000,device=d) for _ in range(30)]); fully_shard(m); "
        "m(torch.randn(2,30000,device=d)).sum().backward()"
    ),
    "gather-index": _anywhere("torch.gather(torch.zeros(4,4,device=d),1,torch.full((4,4),9,device=d)); sync()"),
    "grad-scaler": _script(
        "o=torch.optim.SGD(nn.Linear(2,2).to(d).parameters(),lr=1); s=torch.amp.GradScaler('cuda')\n"
        "s.scale(torch.zeros(1,device=d)); s.step(o)"
    ),
    "graph-capture": _script(
        "x=torch.ones(4,device=d); g=torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g): print(x.sum().item())"
    ),
    "illegal-address": _script(_KERNEL.format("p[1ll<<40]=1.f;", 32)),
    "inference-grad": _anywhere(
        "with torch.inference_mode(): x=torch.randn(2,2,device=d)\n(nn.Linear(2,2).to(d)(x)).sum().backward()"
    ),
    "label-range": _anywhere(
        "F.cross_entropy(torch.randn(4,3,device=d,requires_grad=True), torch.tensor([0,1,2,7],device=d)).backward(); "
        "sync()"
    ),
    "misaligned": _script(_KERNEL.format("*(double*)((char*)p+4)=1.0;", 1)),
    "monitored-mismatch": _anywhere(
        "nccl(device_id=torch.device(d)); dist.all_reduce(torch.ones(1<<20 if R else 1<<10,device=d)); "
        "sync(); print('past')",
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    ),
    "nccl-algo": _script("nccl(); ones()", NCCL_ALGO="nosuch"),
    "nccl-dtype": _script(
        "nccl(); dist.all_reduce(torch.ones(4,device=d,dtype=torch.complex64).view(torch.int16)); sync()"
    ),
    "nccl-memory": _script(
        "x=torch.empty(torch.cuda.mem_get_info()[0]-(8<<20),dtype=torch.uint8,device=d); nccl(); ones()"
    ),
    "net-name": _script("nccl(); ones()", NCCL_NET="nosuch"),
    "net-plugin": _script("nccl(); ones()", NCCL_NET="plugin", NCCL_NET_PLUGIN="/nosuch.so"),
    "no-gpu": _script("torch.zeros(3,device='cuda')", CUDA_VISIBLE_DEVICES=""),
    "no-interface": _script("nccl(); ones()", NCCL_SOCKET_IFNAME="nosuch0"),
    "nvrtc": _script(
        "torch.cuda._compile_kernel('extern \"C\" __global__ void k(float* p){ p[0]=undefined_name; }','k')"
    ),
    "peer-exits": _anywhere("nccl(); ones()\nif R == 1: os._exit(3)\nones(); time.sleep(5)"),
    "peer-raises": _anywhere('nccl(); ones()\nif R==1: raise ValueError("bad sample 17 in shard 3")\nones()'),
    "pin-in-worker": _script(_ON_GPU.format(pins=True)),
    "scaler-fp16-grads": _script(
        "m=nn.Linear(4,4).to(d).half(); o=torch.optim.SGD(m.parameters(),lr=1); s=torch.amp.GradScaler('cuda')\n"
        "s.scale(m(torch.randn(2,4,device=d).half()).sum()).backward(); s.unscale_(o)"
    ),
    "sdpa-flash-fp32": _script(
        "from torch.nn.attention import SDPBackend, sdpa_kernel\nq=torch.randn(1,2,8,16,device=d)\n"
        "with sdpa_kernel(SDPBackend.FLASH_ATTENTION): F.scaled_dot_product_attention(q,q,q)"
    ),
    "stack-overflow": _script(
        'kernel(\'extern "C" __device__ __noinline__ int f(int n, float*p){ volatile int a[64]; a[n%64]=n; '
        'p[0]+=a[n%64]; return n==0?0:f(n-1,p)+a[n%64]; } extern "C" __global__ void k(float* p){ p[1]=f(1<<30,p); '
        "}', 'k', (1,1,1), (1,1,1), [torch.zeros(4,device=d)])"
    ),
    "tensor-device-ordinal": _script("torch.zeros(3,device='cuda:5')"),
    "too-many-threads": _script(_KERNEL.format("p[0]=1.f;", 2048)),
    "trap": _script(_KERNEL.format('asm("trap;");', 1)),
    "two-devices": _script("nn.Linear(4,4).to(d)(torch.randn(2,4))"),
    "watchdog": _anywhere(
        "import datetime\nnccl(timeout=datetime.timedelta(seconds=10)); ones()\nif R == 1: time.sleep(60)\nones()"
    ),
    "weights-on-cpu": _script("nn.Linear(4,4)(torch.randn(2,4,device=d))"),
}
