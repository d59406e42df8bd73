"""Where the checkpoints lie that come with the package."""

from importlib import resources
from pathlib import Path


def shipped_folder(name: str) -> Path:
    """Folder of a checkpoint that comes with the package."""
    return Path(str(resources.files("moe28t_jax"))) / name
