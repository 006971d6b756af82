"""The byte-level language model that the command line trains: model, data, trainer, generation.

Depends on `memtrain_cl.nn` (the counter layers) and `memtrain_cl.export` (files). Nothing here is imported by the rest.
"""
