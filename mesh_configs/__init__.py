"""Deployment files: one mesh per file, named by its topology."""
