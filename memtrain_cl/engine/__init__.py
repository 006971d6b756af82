"""Exported models without torch: an engine file's model on an OpenCL device, by NumPy and pyopencl alone.

    engine = Engine.load("model.safetensors")
    engine.logits(b"def ")                    # float32 [4, 256]
    bytes(engine.generate(b"def ", 100))      # what follows

Weights stay packed on the device, and keys and values of past tokens stay there: a token brings its logits back alone.
"""

from memtrain_cl.engine.context import Context
from memtrain_cl.engine.model import Engine

__all__ = ["Context", "Engine"]
