"""What devices can do: the makers' published figures, and what large matrix products reach where power limits the clock.

What software gets out of them is in `rates`; a cluster file replaces either by what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

GIB = 2**30
GB = 1e9
TERA = 1e12


@dataclass(frozen=True)
class Kernels:
    """What a training step's memory depends on beside the model: how its parts are cut.

    fused: gated activations, rotary positions and Adam are single kernels (Transformer Engine), so that nothing between their
    input and output is held; norms are in any case, as torch's on CUDA (since 2.9) and models/cpu_norm.py.
    chunk_elements: float32 elements of a temporary over the vocabulary, as
    `Platform.chunk_elements`. sums_in_copies: whether gradients are reduced and scattered in a copy of them, as gloo does.
    """

    fused: bool = True
    chunk_elements: int = 16 * 2**20
    sums_in_copies: bool = False


@dataclass(frozen=True)
class Device:
    """One kind of device. Bytes, bytes a second, floating-point operations a second (dense, not sparse).

    flops: in bfloat16 with float32 sums; matmul_flops: of them what the best large product was measured to reach.
    fp32_flops: in float32. fp8_flops: in FP8; 0 where weights in FP8 are widened before they multiply. memory_bytes_s: of the
    device's own memory. inside_bytes_s: to its peers in the node, one direction. between_bytes_s: to other nodes, one
    direction, where the cluster file does not say. host_bytes_s: to the host's memory, one direction. per_node: devices of the
    usual node, which is what fast links join. tile_rows: rows that one matrix instruction takes of the queries of decode
    attention and of an expert's tokens; fewer are padded. queues: whether the host runs ahead of the device, so that
    launching costs time only where there is little to compute. offloads_to_host: whether what is offloaded can leave the device.
    pads_servers: whether SGLang fills numbers of heads up there (Platform.pads_weights). kernels: of a training step.
    source: where the figures are published.
    """

    name: str
    memory_bytes: float
    flops: float
    matmul_flops: float
    fp32_flops: float
    fp8_flops: float
    memory_bytes_s: float
    inside_bytes_s: float
    between_bytes_s: float
    host_bytes_s: float
    per_node: int
    source: str
    tile_rows: int = 64
    queues: bool = True
    offloads_to_host: bool = True
    pads_servers: bool = False
    kernels: Kernels = Kernels()

    def product_flops(self, dtype: str) -> float:
        """What large products of that dtype reach, operations a second."""
        if dtype == "float32":
            return self.fp32_flops
        if dtype == "fp8" and self.fp8_flops:
            return self.fp8_flops * self.matmul_flops / self.flops
        return self.matmul_flops


# "Products" in a source is the table of maximum achievable matmul FLOPS, BF16, of stas00/ml-engineering: 80% of the data sheet
# on H100, 87% on A100. Where it has no figure, the share of an H100 is taken, but for the H20, whose clock power does not limit.
_REACHED = 794.5 / 989.0

_A100 = Device(
    name="A100-80",
    memory_bytes=80 * GIB,
    flops=312 * TERA,
    matmul_flops=271.2 * TERA,
    fp32_flops=19.5 * TERA,
    fp8_flops=0.0,
    memory_bytes_s=2039 * GB,
    inside_bytes_s=300 * GB,
    between_bytes_s=25 * GB,
    host_bytes_s=32 * GB,
    per_node=8,
    tile_rows=16,
    source="NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB); HDR InfiniBand, 200 Gbit/s a device; products",
)
_H100 = Device(
    name="H100",
    memory_bytes=80 * GIB,
    flops=989 * TERA,
    matmul_flops=794.5 * TERA,
    fp32_flops=67 * TERA,
    fp8_flops=1979 * TERA,
    memory_bytes_s=3350 * GB,
    inside_bytes_s=450 * GB,
    between_bytes_s=50 * GB,
    host_bytes_s=64 * GB,
    per_node=8,
    source="NVIDIA H100 Tensor Core GPU data sheet (SXM); NDR InfiniBand, 400 Gbit/s a device; products",
)
_H20 = replace(
    _H100,
    name="H20",
    memory_bytes=96 * GIB,
    flops=148 * TERA,
    matmul_flops=148 * TERA,
    fp32_flops=44 * TERA,
    fp8_flops=296 * TERA,
    memory_bytes_s=4000 * GB,
    source="NVIDIA H20 (HGX, 96 GB) as sold; attention alone reaches 0.87 of its peak (flash-attention, issue 1310)",
)
_B200 = Device(
    name="B200",
    memory_bytes=178 * GIB,
    flops=2250 * TERA,
    matmul_flops=2250 * TERA * _REACHED,
    fp32_flops=75 * TERA,
    fp8_flops=4500 * TERA,
    memory_bytes_s=8000 * GB,
    inside_bytes_s=900 * GB,
    between_bytes_s=50 * GB,
    host_bytes_s=64 * GB,
    per_node=8,
    source="NVIDIA DGX B200 data sheet (an eighth; 180 GB, 178 GiB usable); NDR InfiniBand, 400 Gbit/s a device",
)
_MI300X = Device(
    name="MI300X",
    memory_bytes=190 * GIB,
    flops=1307 * TERA,
    matmul_flops=668.4 * TERA,
    fp32_flops=163.4 * TERA,
    fp8_flops=2615 * TERA,
    memory_bytes_s=5300 * GB,
    inside_bytes_s=448 * GB,
    between_bytes_s=50 * GB,
    host_bytes_s=64 * GB,
    per_node=8,
    tile_rows=16,
    source="AMD Instinct MI300X data sheet (192 GB); seven links of 64 GB/s; 400 Gbit/s a device; products",
)
_L40S = Device(
    name="L40S",
    memory_bytes=48 * GB,
    flops=362 * TERA,
    matmul_flops=362 * TERA * _REACHED,
    fp32_flops=91.6 * TERA,
    fp8_flops=733 * TERA,
    memory_bytes_s=864 * GB,
    inside_bytes_s=32 * GB,
    between_bytes_s=25 * GB,
    host_bytes_s=32 * GB,
    per_node=8,
    tile_rows=16,
    source="NVIDIA L40S data sheet (no NVLink: PCIe Gen4 x16); 200 Gbit/s a device",
)
# One or two in a workstation or a rented machine. Those without NVLink reach each other through the host.
_SINGLES = (
    replace(
        _H100,
        name="H100-NVL",
        memory_bytes=93 * GIB,
        flops=835 * TERA,
        matmul_flops=835 * TERA * _REACHED,
        fp32_flops=60 * TERA,
        fp8_flops=1671 * TERA,
        memory_bytes_s=3900 * GB,
        inside_bytes_s=64 * GB,
        source="NVIDIA H100 Tensor Core GPU data sheet (NVL, 94 GB): PCIe Gen5; bridges join but two, or four",
    ),
    replace(
        _H100,
        name="H200-NVL",
        memory_bytes=139 * GIB,
        flops=835 * TERA,
        matmul_flops=835 * TERA * _REACHED,
        fp32_flops=60 * TERA,
        fp8_flops=1671 * TERA,
        memory_bytes_s=4800 * GB,
        inside_bytes_s=64 * GB,
        source="NVIDIA H200 Tensor Core GPU data sheet (NVL, 141 GB, 139 GiB usable): PCIe Gen5; bridges join but two, or four",
    ),
    replace(
        _H100,
        name="H100-PCIe",
        flops=756 * TERA,
        matmul_flops=756 * TERA * _REACHED,
        fp32_flops=51 * TERA,
        fp8_flops=1513 * TERA,
        memory_bytes_s=2000 * GB,
        inside_bytes_s=64 * GB,
        source="NVIDIA H100 Tensor Core GPU data sheet (PCIe, 80 GB): PCIe Gen5",
    ),
    replace(
        _L40S,
        name="L4",
        memory_bytes=22.5 * GIB,
        flops=121 * TERA,
        matmul_flops=121 * TERA * _REACHED,
        fp32_flops=30.3 * TERA,
        fp8_flops=242 * TERA,
        memory_bytes_s=300 * GB,
        source="NVIDIA L4 data sheet (24 GB, with ECC 22.5 GiB; without sparsity): PCIe Gen4",
    ),
    replace(
        _L40S,
        name="A10",
        memory_bytes=22.5 * GIB,
        flops=125 * TERA,
        matmul_flops=125 * TERA * _REACHED,
        fp32_flops=31.2 * TERA,
        fp8_flops=0.0,
        memory_bytes_s=600 * GB,
        source="NVIDIA A10 data sheet (24 GB, with ECC 22.5 GiB): PCIe Gen4",
    ),
    replace(
        _L40S,
        name="RTX-A6000",
        flops=154.8 * TERA,
        matmul_flops=154.8 * TERA * _REACHED,
        fp32_flops=38.7 * TERA,
        fp8_flops=0.0,
        memory_bytes_s=768 * GB,
        source="NVIDIA RTX A6000 data sheet (48 GB; half of what it says for sparse matrices): PCIe Gen4",
    ),
    replace(
        _L40S,
        name="RTX-6000-Ada",
        flops=364.2 * TERA,
        matmul_flops=364.2 * TERA * _REACHED,
        fp32_flops=91.1 * TERA,
        fp8_flops=728.5 * TERA,
        memory_bytes_s=960 * GB,
        source="NVIDIA RTX 6000 Ada Generation data sheet (48 GB; half of what it says for sparse matrices): PCIe Gen4",
    ),
    replace(
        _L40S,
        name="RTX-4090",
        memory_bytes=23.5 * GIB,
        flops=165.2 * TERA,
        matmul_flops=165.2 * TERA * _REACHED,
        fp32_flops=82.6 * TERA,
        fp8_flops=330.3 * TERA,
        memory_bytes_s=1008 * GB,
        inside_bytes_s=16 * GB,
        source="NVIDIA Ada GPU architecture, RTX 4090 (24 GB; sums in float32): PCIe Gen4, no access between devices",
    ),
    replace(
        _L40S,
        name="RTX-5090",
        memory_bytes=31.3 * GIB,
        flops=209.5 * TERA,
        matmul_flops=209.5 * TERA * _REACHED,
        fp32_flops=104.8 * TERA,
        fp8_flops=419 * TERA,
        memory_bytes_s=1792 * GB,
        host_bytes_s=64 * GB,
        source="NVIDIA RTX Blackwell GPU architecture, RTX 5090 (32 GB; sums in float32): PCIe Gen5, no access between devices",
    ),
)
_CPU = Device(
    name="cpu",
    memory_bytes=6 * GIB,
    flops=150 * GB,
    matmul_flops=150 * GB,
    fp32_flops=100 * GB,
    fp8_flops=0.0,
    memory_bytes_s=40 * GB,
    inside_bytes_s=1 * GB,
    between_bytes_s=0.1 * GB,
    host_bytes_s=5 * GB,
    per_node=2,
    tile_rows=1,
    queues=False,
    offloads_to_host=False,
    pads_servers=True,
    kernels=Kernels(fused=False, chunk_elements=2**20, sums_in_copies=True),
    source="one core of a desktop processor as a device, measured with this project; measure your own",
)
# What differs from another device in little.
_VARIANTS = (
    replace(
        _A100,
        name="A100-40",
        memory_bytes=40 * GIB,
        memory_bytes_s=1555 * GB,
        source="NVIDIA A100 Tensor Core GPU data sheet (SXM, 40 GB); HDR InfiniBand, 200 Gbit/s a device",
    ),
    replace(
        _A100,
        name="A800",
        inside_bytes_s=200 * GB,
        source="NVIDIA A800 data sheet: an A100 with NVLink of 400 GB/s, both directions together",
    ),
    replace(
        _H100,
        name="H800",
        inside_bytes_s=200 * GB,
        source="an H100 with NVLink of 400 GB/s, both directions together (DeepSeek-V3, arXiv 2412.19437, section 3.1)",
    ),
    replace(
        _H100,
        name="H200",
        memory_bytes=139 * GIB,
        memory_bytes_s=4800 * GB,
        source="NVIDIA H200 data sheet (SXM, 141 GB, 139 GiB usable); NDR InfiniBand; products of the H100, the same chip",
    ),
    replace(
        _H20,
        name="H20-141",
        memory_bytes=139 * GIB,
        source="as H20, with 141 GB; its maker does not publish its bandwidth: the smaller one's is taken",
    ),
    replace(
        _B200,
        name="GB200",
        memory_bytes=184 * GB,
        flops=2500 * TERA,
        matmul_flops=2500 * TERA * _REACHED,
        fp32_flops=80 * TERA,
        fp8_flops=5000 * TERA,
        host_bytes_s=225 * GB,
        per_node=64,
        source="NVIDIA GB200 NVL72 data sheet (186 GB); a node is a rack, of whose 72 devices 64 are used; NVLink-C2C",
    ),
    replace(
        _B200,
        name="B300",
        memory_bytes=268 * GIB,
        between_bytes_s=100 * GB,
        source="NVIDIA DGX B300 data sheet (an eighth; 288 GB); 800 Gbit/s a device",
    ),
    replace(
        _MI300X,
        name="MI325X",
        memory_bytes=254 * GIB,
        matmul_flops=784.9 * TERA,
        memory_bytes_s=6000 * GB,
        source="AMD Instinct MI325X data sheet (256 GB); links as MI300X; products",
    ),
)
# Ranks on these synchronise through PCIe.
WITHOUT_NVLINK = frozenset({_L40S.name, *(device.name for device in _SINGLES)})

DEVICES: Mapping[str, Device] = MappingProxyType(
    {each.name: each for each in (_A100, _H100, _H20, _B200, _MI300X, _L40S, *_VARIANTS, *_SINGLES, _CPU)}
)
