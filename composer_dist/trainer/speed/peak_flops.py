"""The peak FLOP/s of devices."""

import re

import torch

# Dense 16-bit matrix products with 32-bit sums, in FLOP/s, by words of the device's name; the first match
# counts. From the makers' data sheets, without sparsity.
_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "B100": 1.75e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "RTX A6000": 154.8e12,
    "MI355X": 2.5e15,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,
}


_OTHER = re.compile(r"\b(MIG|Laptop|Max-Q|Ti|SUPER|D)\b", re.I)
"""Slices of a device, and devices that share a name with a faster or slower one."""


def peak_flops(device: torch.device) -> float | None:
    """The device's peak in 16-bit matrix products, in FLOP/s; None where it is not known."""
    if device.type == "cpu":
        return None
    name: str = torch.get_device_module(device).get_device_name(device)
    return peak_of(name)


def peak_of(name: str) -> float | None:
    """The peak of the device of this name; None if it is not known, or the device is a slice of one."""
    if _OTHER.search(name):
        return None
    return next((peak for part, peak in _PEAKS.items() if re.search(rf"\b{part}\b", name, re.I)), None)
