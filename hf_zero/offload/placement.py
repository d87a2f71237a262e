"""Which buckets' state moves to a tier, and which stays with the parameters."""

import torch

from .tier import Tier


class Placement:
    """Gives each bucket its tier, in the order in which gradients arrive, until `ratio` of the elements have moved.

    [Note: which part moves]
    The first buckets move: the fewest that hold at least `ratio` of the trained elements. Gradients of these arrive while
    backward still runs, so that the way to the tier and the step there have something to hide behind. The last ones, which
    would have nothing, are stepped on the training device. Every rank comes to the same answer.

    Twin-Flow is DeepSpeed's name for it: Lian et al., "DeepSpeed-Offload++", 2023.

    Args:
        device: of the parameters.
        ratio: above 0, up to 1.
        trained_numel: elements of all trained parameters.

    Attributes:
        tier, device_tier: of what moves, and of what stays.
    """

    def __init__(self, tier: Tier, device: torch.device, *, ratio: float, trained_numel: int):
        self.tier = tier
        self.device_tier = Tier(device)
        self._left_numel = ratio * trained_numel

    def next_tier(self, numel: int) -> Tier:
        """The tier of the next bucket of trained parameters, which hold `numel` elements. Called once for each."""
        # A share such as 0.7 of the elements is no whole number, and what is left of it may be a rounding error.
        moves = self._left_numel > 0.5
        self._left_numel -= numel
        return self.tier if moves else self.device_tier
