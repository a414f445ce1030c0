"""Peak TFLOP/s of dense matrix products on known GPUs, by the name that CUDA gives the device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Peak:
    """Dense TFLOP/s with sums in fp32. `bf16` is None if the tensor cores lack it; so is `tf32`."""

    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float


# From NVIDIA's datasheets and architecture whitepapers (V100, T4, A100, GA102, H100, AD102, L4, L40S, H200, Blackwell
# HGX and DGX). Datasheets since 2020 state the rate with 2:4 sparsity, twice the dense one given here. For GeForce
# cards it is the rate with sums in fp32, half of the other.
PEAKS = {
    "V100 SXM2": Peak(125, None, None, 15.7),
    "V100 SXM3": Peak(125, None, None, 15.7),
    "V100 PCIE": Peak(112, None, None, 14.0),
    "V100S PCIE": Peak(130, None, None, 16.4),
    "T4": Peak(65, None, None, 8.1),
    "A100": Peak(312, 312, 156, 19.5),
    "A800": Peak(312, 312, 156, 19.5),
    "A30": Peak(165, 165, 82, 10.3),
    "A40": Peak(149.7, 149.7, 74.8, 37.4),
    "A10": Peak(125, 125, 62.5, 31.2),
    "RTX A6000": Peak(154.8, 154.8, 77.4, 38.7),
    "RTX 3090": Peak(71, 71, 35.6, 35.6),
    "RTX 3090 Ti": Peak(80, 80, 40, 40),
    "H100": Peak(989.4, 989.4, 494.7, 66.9),
    "H100 PCIe": Peak(756, 756, 378, 51.2),
    "H100 NVL": Peak(835.5, 835.5, 417.5, 60),
    "H800": Peak(989.4, 989.4, 494.7, 66.9),
    "H800 PCIe": Peak(756, 756, 378, 51.2),
    "H20": Peak(148, 148, 74, 44),
    "H200": Peak(989.4, 989.4, 494.7, 66.9),
    "H200 NVL": Peak(835.5, 835.5, 417.5, 60),
    "GH200": Peak(989.4, 989.4, 494.7, 66.9),
    "L4": Peak(121, 121, 60, 30.3),
    "L40": Peak(181, 181, 90.5, 90.5),
    "L40S": Peak(362, 362, 183, 91.6),
    "RTX 6000 Ada": Peak(364.2, 364.2, 182.1, 91.1),
    "RTX 4090": Peak(165.2, 165.2, 82.6, 82.6),
    "RTX 5090": Peak(209.5, 209.5, 104.8, 104.8),
    "B200": Peak(2250, 2250, 1125, 75),
    "B300": Peak(2250, 2250, 1125, 75),
    "GB200": Peak(2500, 2500, 1250, 80),
    "GB300": Peak(2500, 2500, 1250, 80),
}

# Words that after a name denote another device, which is unknown unless the table has it.
OTHER = {"ti", "super", "d", "laptop", "max", "mig"}


def peak_tflops(device: str, precision: Literal["fp32", "bf16", "fp16"], *, tf32: bool = False) -> float | None:
    """Return the peak of a device in a precision; None if it is unknown.

    Args:
        device: the name from `torch.cuda.get_device_name`: `NVIDIA H100 80GB HBM3`.
        tf32: whether matrix products in fp32 may round their inputs to TF32.
    """
    words = set(re.split(r"[\s-]+", device.lower()))
    fitting = [name for name in PEAKS if set(name.lower().split()) <= words]
    if not fitting:
        return None
    best = max(fitting, key=lambda name: len(name.split()))
    if words & OTHER - set(best.lower().split()):
        return None
    peak = PEAKS[best]
    if precision == "fp32":
        return (tf32 and peak.tf32) or peak.fp32
    return peak.fp16 if precision == "fp16" else peak.bf16
