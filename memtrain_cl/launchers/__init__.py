"""Launchers of kernels over operands and arrays that are on a device already.

Nothing here knows torch: what runs with torch (`memtrain_cl.ops`, `memtrain_cl.torch_device`) and what runs without it
(`memtrain_cl.engine`) launch by the same functions.
"""
