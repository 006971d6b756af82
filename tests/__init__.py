"""The test suite. Its own pool of threads and the OpenCL runtime's share the cores, as under the command line."""

from memtrain_cl.runtimes import share_cores

share_cores()  # runs before conftest.py, and so before torch is imported
