"""Accelerator kernels for hybrid linear/sparse attention models, in JAX alone.

Every operation is one subpackage, imported explicitly:

    from pallas_kernels import delta_rule, index_select, mxfp4_matmul, sparse_attention

Importing `pallas_kernels` itself loads nothing.
"""
