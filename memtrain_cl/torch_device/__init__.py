"""The torch device "opencl": ``model.to("opencl")``, on any OpenCL device, in Python alone.

Importing this package registers the name (as torch itself does on import, by memtrain_cl's entry point); a device is
opened with its first tensor.
"""

from memtrain_cl.torch_device.backend import register, require_registered

require_registered()

__all__ = ["register", "require_registered"]
