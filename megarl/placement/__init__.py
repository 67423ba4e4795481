"""Where everything runs: inventories of devices, models of time and memory, and the search over placements.

Pure arithmetic over numpy arrays: no torch, no Megatron, no Ray. It decides and explains; carrying a placement out is the
cluster room's work.
"""
