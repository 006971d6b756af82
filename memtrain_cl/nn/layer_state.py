"""A counter layer to and from `LayerState`, the NumPy description that exporters and importers speak."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from memtrain_cl.formats import LayerState
from memtrain_cl.nn.counter import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear

_KINDS: dict[str, type[CompactCounterLinear]] = {
    kind.__name__: kind for kind in (CompactCounterLinear, RMSCounterLinear, PackedRMSCounterLinear)
}
