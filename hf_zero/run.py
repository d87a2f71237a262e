"""Runs a training script that knows nothing of hf_zero with the engine: `accelerate launch -m hf_zero.run --zero 2 train.py ...`.

Every rank of `accelerate launch` or `torchrun` runs this module in place of the script. Each `Accelerator` that the script
builds, and each `Trainer`, gets the engine; the script sees its own arguments, name and folder.
"""

from .integrations.unmodified import main

if __name__ == "__main__":
    main()
