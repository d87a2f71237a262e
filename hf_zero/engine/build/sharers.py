"""The ranks that share state: all of the data axis, or for experts that are split over more ranks, those that hold the same."""

from dataclasses import dataclass

from torch import nn

from ...buckets.bucket import Bucket
from ...comm.groups.groups import Groups
from ...comm.transport import Transport
from ..units.split_model import SplitModel


@dataclass(frozen=True, kw_only=True)
class Sharers:
    """Ranks that share the state of the same parameters.

    Attributes:
        transport: between them.
        step_transport: between those of them that take each step together.
    """

    groups: Groups
    transport: Transport
    step_transport: Transport

    @property
    def is_first(self) -> bool:
        """Whether this rank is of the first of the groups that have the same state."""
        return self.groups.rank == self.groups.shard_rank


@dataclass(frozen=True, kw_only=True)
class SharersOfKinds:
    """The same for both kinds of parameters.

    Attributes:
        usual: of all parameters but experts.
        experts: `usual`, unless experts are split over more ranks than the rest of the model.
    """

    split: SplitModel
    usual: Sharers
    experts: Sharers

    def of(self, bucket: Bucket) -> Sharers:
        """Of what is in a bucket."""
        return self.experts if bucket.key.is_expert else self.usual

    def of_parameter(self, parameter: nn.Parameter) -> Sharers:
        """Of one parameter of the model."""
        return self.experts if parameter in self.split.experts else self.usual

    def place_of(self, parameter: nn.Parameter) -> tuple[tuple[int, ...], int]:
        """The ranks with the same part of a parameter, and this rank's shard: where both are the same, there are copies.

        All of the ranks: those that share experts may begin with the same rank as those that share the rest.
        """
        sharers = self.of_parameter(parameter)
        return sharers.groups.world.ranks, sharers.groups.shard_rank

    def transport_of(self, bucket: Bucket) -> Transport:
        """Between the ranks that share what is in a bucket."""
        return self.of(bucket).transport

    def step_transport_of(self, bucket: Bucket) -> Transport:
        """Between those of them that take each step together."""
        return self.of(bucket).step_transport
