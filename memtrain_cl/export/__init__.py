"""Model files: the engine format (packed.py), the formats of other programs, an optimizer's state (optimizer.py).

Every write is atomic, every read distrusts.
"""
