"""What torch calls when it is imported (entry point group ``torch.backends``): it names the device "opencl".

It must be quick and must never raise, for torch's import would fail with it. Where torch came with support for a GPU
of its own, nothing is registered: torch takes a registered device for the machine's accelerator, pinned memory and all,
so that is left to an ``import memtrain_cl.torch_device`` in the program.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("memtrain_cl")


def has_own_gpu() -> bool:
    """Whether torch came with support for a GPU."""
    import torch

    return bool(torch.version.cuda or torch.version.hip or torch.backends.mps.is_built() or torch.xpu._is_compiled())


def register() -> None:
    """Register the device "opencl" with torch, or log why not."""
    try:
        if has_own_gpu():
            logger.debug("torch has a device of its own; import memtrain_cl.torch_device to have 'opencl' beside it")
            return
        import memtrain_cl.torch_device  # noqa: F401
    except Exception as error:  # noqa: BLE001 (see above)
        logger.info("the device 'opencl' was not registered with torch: %s", error)
