"""``python -m bench`` runs every family on the current device; names of families run those alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import (
    adam,
    aten,
    attention,
    automagic,
    blockwise,
    counter,
    decode,
    files,
    fp8,
    hadamard,
    int8,
    layer,
    matmul,
    model,
    profile,
    recompute,
    sharing,
    stochastic,
)
from bench.harness import Bench
from memtrain_cl.device import get_device, use_device

FAMILIES = {
    "adam": adam.run,
    "aten": aten.run,
    "attention": attention.run,
    "automagic": automagic.run,
    "blockwise": blockwise.run,
    "counter": counter.run,
    "decode": decode.run,
    "files": files.run,
    "fp8": fp8.run,
    "hadamard": hadamard.run,
    "int8": int8.run,
    "layer": layer.run,
    "matmul": matmul.run,
    "model": model.run,
    "profile": profile.run,
    "recompute": recompute.run,
    "sharing": sharing.run,
    "stochastic": stochastic.run,
}


def main() -> None:
    """Parse, measure, file."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure kernels and training on a device.")
    parser.add_argument("families", nargs="*", help=f"which to run: {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--device", help="index of a device, or a part of its name")
    parser.add_argument("--out", type=Path, help="file to write (default: bench/results/<version>/<device>.json)")
    options = parser.parse_args()
    unknown = set(options.families) - set(FAMILIES)
    if unknown:
        parser.error(f"expected families of {', '.join(FAMILIES)}, got {', '.join(sorted(unknown))}")
    device = get_device(options.device)
    with use_device(device):
        bench = Bench(device)
        print(f"{device.info.label}: copy {bench.copy_gbps:.1f} GB/s", flush=True)
        for name in options.families or FAMILIES:
            FAMILIES[name](bench)
        print(f"wrote {bench.write(options.out)}")


if __name__ == "__main__":
    main()
