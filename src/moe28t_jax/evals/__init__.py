"""Scoring models: compiled likelihood loops."""

from moe28t_jax.evals.bits import FileScore, score_texts

__all__ = ["FileScore", "score_texts"]
