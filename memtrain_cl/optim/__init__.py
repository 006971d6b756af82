"""Optimizers in torch's shape."""

from memtrain_cl.optim.controller import CounterController

__all__ = ["CounterController"]
