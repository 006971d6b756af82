"""Files: the engine format (packed.py) and MotifCL's (motifcl.py). Every write is atomic, every read distrusts."""
