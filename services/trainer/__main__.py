"""Runs the trainer: `python -m services.trainer`, or `torchrun -m services.trainer`."""

from services.trainer.command import main

if __name__ == "__main__":
    main()
