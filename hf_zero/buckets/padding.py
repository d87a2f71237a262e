"""What lies between and behind the parameters of a flat buffer: zeros.

Elsewhere than on the host new memory holds anything. A block of a quantised tensor may begin in a parameter and end in
padding, and has one scale: a NaN in the one would make the other NaN.
"""

import torch

from ..layout.intervals import Interval
from ..layout.slots import BucketLayout


def clear_padding(flat: torch.Tensor, layout: BucketLayout, part: Interval | None = None) -> torch.Tensor:
    """Zeros `flat` where it holds no parameter, and returns it.

    Args:
        flat: 1-D, laid out as a bucket, or as the elements `part` of one.
    """
    part = part or Interval(0, layout.numel)
    for gap in layout.padding:
        common = gap.intersect(part)
        if common is not None:
            flat[common.start - part.start : common.stop - part.start].zero_()
    return flat
