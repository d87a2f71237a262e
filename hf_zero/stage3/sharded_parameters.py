"""Replaces a module's `_parameters` while parameters of the module are sharded. Reads gather first."""

from collections.abc import Mapping
from typing import Any, SupportsIndex

from torch import nn

from ..buckets.bucket import ParameterSlot
from ..buckets.sharded_parameter import ShardedParametersError, are_hidden
from .unit import Unit
from .unsharding import Unsharding


class ShardedParameters(dict):
    """Replaces one module's `_parameters` while any unit with a parameter of the module is sharded.

    Shapes, dtypes and names can be read. If another module's forward reads a value, the unit is gathered first. Copying and
    pickling raise.

    Attributes:
        slots: maps names in the module to the unit and slot of each sharded parameter.
    """

    def __init__(self, module: nn.Module, slots: Mapping[str, tuple[Unit, ParameterSlot]], schedule: Unsharding):
        super().__init__()
        self.slots = dict(slots)
        # Usually only one unit.
        self.units = list(dict.fromkeys(unit for unit, _ in slots.values()))
        self._schedule = schedule
        self._module = module
        # The module's own dict, which is restored when the units are whole.
        self.stock: dict[str, nn.Parameter | None] = {}

    def follow_units(self) -> None:
        """Exchanges the module's dict after a change of state of one of the units."""
        # Bypasses `nn.Module.__getattr__`, for speed.
        held: Any = self._module.__dict__["_parameters"]
        if not any([unit.is_sharded for unit in self.units]):
            if held is self:
                self._module.__dict__["_parameters"] = self.stock
            return
        if held is self:
            return
        if held is not self.stock:
            self.stock = held
            self.clear()
        self.update(held)
        if len(self) != len(held):
            # A name was deleted from the module's own dict.
            self.clear()
            self.update(held)
        self._module.__dict__["_parameters"] = self

    def remove(self) -> None:
        """Restores the module's own dict, in any state."""
        if self._module.__dict__["_parameters"] is self:
            self._module.__dict__["_parameters"] = self.stock

    def _before_read(self, name: str) -> None:
        # Outside a pass, a read only concerns shape or dtype, and maybe only one rank reads. A whole parameter needs no gather:
        # its layer is running, or is kept. (This dict may still be in use if another unit of the module is sharded.)
        if name in self.slots and self._schedule.in_pass and are_hidden(self.slots[name][1].parameter):
            self._schedule.before_read(self.slots[name][0])

    def __getitem__(self, name: str):
        self._before_read(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value) -> None:
        # This method and the two below change both dicts, because the module's own dict is restored when the units are whole.
        super().__setitem__(name, value)
        self.stock[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.stock[name]

    def pop(self, name: str, *default):
        self.stock.pop(name, None)
        return super().pop(name, *default)

    def __deepcopy__(self, memo: dict):
        raise copy_refusal("copied")

    def __reduce_ex__(self, protocol: SupportsIndex):
        raise copy_refusal("pickled")


def copy_refusal(verb: str) -> ShardedParametersError:
    return ShardedParametersError(
        f"hf_zero: a model whose parameters are sharded over the ranks (stage 3) cannot be {verb}. Save it with "
        "save_pretrained, accelerator.save_model or torch.save(model.state_dict()) on all ranks, or copy it before "
        "accelerator.prepare or after engine.close()."
    )
