"""The byte-level language model that the command line trains: model, data, trainer.

Depends on `memtrain_cl.nn` (the counter layers) and `memtrain_cl.export` (files). The command line imports it, and the
engine what it says of a model (config.py, description.py), which is without torch.
"""
