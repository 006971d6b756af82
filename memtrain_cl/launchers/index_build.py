"""The kernels of kernels/index.cl, by what is to be moved: one place that knows the file's constants."""

from __future__ import annotations

from functools import lru_cache

from memtrain_cl.device import Device
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import LARGEST_GROUP, groups_share_rows

#: Consecutive elements of a mask that an item of a GPU's work-group looks at.
MASK_PER_ITEM = 8
#: Items that rank keys together: few, so that a short list still fills a GPU.
RANK_GROUP = 64

_GROUP_LIMIT = {"plan": RANK_GROUP, "radix": LARGEST_GROUP, "mask": LARGEST_GROUP}


@lru_cache(maxsize=1024)
def group_size(device: Device, part: str) -> int:
    """Items of a work-group in a part's kernels: a power of two, 1 in the CPU's shape."""
    info = device.info
    if part not in _GROUP_LIMIT or not groups_share_rows(info):
        return 1
    return 1 << (min(_GROUP_LIMIT[part], info.max_work_group_size).bit_length() - 1)


@lru_cache(maxsize=4096)
def index_kernel(
    device: Device,
    part: str,
    name: str,
    *,
    index: str = "int64",
    unit: int = 4,
    element: str = "float32",
    reduce: str = "copy",
) -> Kernel:
    """A part's kernel; index, element: types by name; unit: bytes moved at once; reduce: of scatter_walk."""
    return get_kernel(
        device,
        "index",
        name,
        PART=part,
        GPU=int(groups_share_rows(device.info)),
        INDEX=index,
        UNIT=unit,
        T=element,
        REDUCE=reduce,
        WG_SIZE=group_size(device, part),
        PER=MASK_PER_ITEM,
    )
