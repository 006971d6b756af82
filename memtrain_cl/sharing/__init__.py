"""Memory that CUDA and NVIDIA's OpenCL driver share, so that kernels work on torch's CUDA tensors in place.

segment.py makes a piece of such memory, pool.py cuts it into tensors, external.py holds the OpenCL calls, cuda.py knows
which OpenCL device is which CUDA device, home.py is the visit's view of it, and rehome.py moves tensors there.
"""

from memtrain_cl.sharing.rehome import share

__all__ = ["share"]
