"""Meshes: which devices a deployment has and how the axes of a mesh divide them."""

from moe28t_jax.parallel.mesh_file import AXES, MeshFile, load_mesh_file, mesh_file_names

__all__ = ["AXES", "MeshFile", "load_mesh_file", "mesh_file_names"]
