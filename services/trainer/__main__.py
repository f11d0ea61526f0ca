"""Runs the trainer: `python -m services.trainer`, or `torchrun -m services.trainer`."""

from services.trainer.command import main, preload

__all__ = ("main", "preload")
if __name__ == "__main__":
    main()
