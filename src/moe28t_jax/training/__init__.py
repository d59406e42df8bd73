"""Training: the step of models of any size (`nano` trains the small one that ships)."""

from moe28t_jax.training.step import Batch, TrainSettings, TrainState, TrainStep, adamw, loss_function

__all__ = ["Batch", "TrainSettings", "TrainState", "TrainStep", "adamw", "loss_function"]
