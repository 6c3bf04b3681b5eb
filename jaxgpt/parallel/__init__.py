"""Devices, meshes, the sharding table, and the processes of a run."""
