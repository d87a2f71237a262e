"""Classes that are replaced at run time keep working whatever bases, metaclass and `__init_subclass__` a script gave them."""

import copy
import pickle
from abc import ABC, ABCMeta, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import pytest
import torch
from accelerate import Accelerator
from shared_ranks import on_ranks
from torch import nn
from trainer_job import as_launched, history, make_trainer
from transformers import Trainer

from hf_zero import ZeroPlugin, engine_of
from hf_zero.hooks.guards import Guard, Guarded
from hf_zero.hooks.mixins import mix_in

Value = TypeVar("Value")


class Slotted:
    __slots__ = ()


class Abstract(ABC):
    @abstractmethod
    def show(self) -> str: ...


class Shows(Protocol):
    def show_all(self) -> str: ...


@dataclass(slots=True)
class Counted:
    count: int = 5


class Kinds:
    """Needs a keyword for each subclass, and counts its subclasses."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, kind: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Kinds.known.append(kind)


class Final:
    def __init_subclass__(cls) -> None:
        if any(issubclass(base, Final) and base is not Final for base in cls.__bases__):
            raise TypeError(f"{cls.__name__} extends a final class")


class Registry(type):
    """Needs a keyword for each class, and forbids two classes of one name."""

    names: ClassVar[set[str]] = set()

    def __new__(metaclass, name: str, bases: tuple, members: dict, *, key: str):
        if (name, key) in metaclass.names:
            raise TypeError(f"two classes are called {name}")
        metaclass.names.add((name, key))
        return super().__new__(metaclass, name, bases, members)

    def __init__(cls, name: str, bases: tuple, members: dict, *, key: str):
        super().__init__(name, bases, members)


class AbstractRegistry(Registry, ABCMeta):
    pass


class Thing:
    def __init__(self) -> None:
        self.number = 3

    def show(self) -> str:
        return "thing"


class AbstractFirst(ABC, Thing): ...


class AbstractLast(Thing, ABC): ...


class AbstractMethod(Abstract, Thing):
    def show(self) -> str:
        return Thing.show(self)


class GenericFirst(Generic[Value], Thing): ...


class GenericLast(Thing, Generic[Value]): ...


class SlottedFirst(Slotted, Thing): ...


class Dictless(Slotted, Thing):
    __slots__ = ("__dict__", "own")


class ProtocolFirst(Shows, Thing):
    def __init__(self) -> None:
        Thing.__init__(self)


class OfAKind(Kinds, Thing, kind="first"): ...


class OfAFinalClass(Final, Thing): ...


class Registered(Thing, metaclass=Registry, key="one"): ...


class RegisteredFirst(Slotted, Thing, metaclass=AbstractRegistry, key="two"): ...


class AllOfThem(ABC, Generic[Value], Slotted, Kinds, Thing, kind="last"): ...


class WithFields(Counted, Thing):
    def __init__(self) -> None:
        Counted.__init__(self, 5)
        Thing.__init__(self)


class Mixed:
    def show(self) -> str:
        return f"mixed {super().show()}"


KINDS = [
    Thing, AbstractFirst, AbstractLast, AbstractMethod, GenericFirst, GenericLast, SlottedFirst, Dictless, ProtocolFirst, OfAKind,
    OfAFinalClass, Registered, RegisteredFirst, AllOfThem, WithFields,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_of_any_class_gets_a_mixin_and_stays_what_it_was(kind):
    known, thing, plain = list(Kinds.known), kind(), kind()
    mix_in(thing, Mixed)
    made: Any = type(thing)
    mix_in(thing, Mixed)
    assert type(thing) is made and Kinds.known == known
    for again in (thing, pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing), copy.copy(thing)):
        assert type(again) is made and again.show() == "mixed thing" and again.number == 3
        assert isinstance(again, kind) and isinstance(again, Mixed)
    shown = [(each.__module__, each.__qualname__, each.__name__, each.__doc__) for each in (made, kind)]
    assert shown[0] == shown[1] and isinstance(made, type(kind)) and type(made).__name__ == type(kind).__name__
    assert [each for each in made.__mro__ if each in kind.__mro__] == list(kind.__mro__)
    # Asked in this order, the classes would share what ABCMeta has stored of `plain`, if they had one store.
    assert isinstance(plain, kind) and not isinstance(plain, made) and not isinstance(plain, Mixed)
    assert plain.show() == "thing"


def test_a_class_that_the_script_derives_from_a_replaced_one_is_announced():
    thing = OfAKind()
    mix_in(thing, Mixed)
    further = type("Further", (type(thing),), {}, kind="further")
    assert Kinds.known[-1] == "further" and further().show() == "mixed thing"
    first = AbstractFirst()
    mix_in(first, Mixed)
    assert type("Further", (type(first),), {})().show() == "mixed thing"


class AnswersNothing(Guarded):
    __slots__ = ()


class KindOfParameter(Kinds, nn.Parameter, kind="parameter"): ...


class SlottedParameter(Slotted, nn.Parameter): ...


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer, KindOfParameter, SlottedParameter])
def test_parameters_of_any_class_are_guarded_and_freed(kind):
    guard, known = Guard(AnswersNothing), list(Kinds.known)
    parameter = kind(torch.ones(3))
    before = type(parameter)
    guard.guard([parameter])
    assert (
        isinstance(parameter, AnswersNothing)
        and isinstance(parameter, before)
        and type(parameter).__name__ == before.__name__
    )
    assert guard.are_guarded([parameter]) and Kinds.known == known
    guard.unguard([parameter])
    assert type(parameter) is before
    guard.guard([parameter])
    del parameter


# ---- Trainers and Accelerators of such classes train ----


class TrainerOfAKind(Kinds, Trainer, kind="trainer"): ...


class AbstractTrainer(ABC, Trainer): ...


class GenericTrainer(Generic[Value], Trainer): ...


class SlottedTrainer(Slotted, AbstractTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@on_ranks(2)
def test_trainers_with_any_bases_have_ddps_losses(rank, world_size, tmp_path):
    as_launched(rank, world_size)
    settings: dict[str, Any] = {"max_steps": 2, "dropout": 0.0, "save_steps": 2, "save_strategy": "steps"}
    plain = make_trainer("ddp", "gpt2", tmp_path / "ddp", **settings)
    plain.train()
    for kind in (TrainerOfAKind, AbstractTrainer, GenericTrainer, SlottedTrainer):
        trainer = make_trainer("callback 2", "gpt2", tmp_path / kind.__name__, trainer_class=kind, **settings)
        trainer.train()
        assert history(trainer) == history(plain) and type(trainer).__name__ == kind.__name__
        assert (tmp_path / kind.__name__ / "checkpoint-2").is_dir()


class AbstractAccelerator(ABC, Accelerator): ...


class AbstractAdam(ABC, torch.optim.Adam): ...


class AbstractLinear(ABC, nn.Linear): ...


class AbstractScaler(ABC, torch.amp.GradScaler): ...


@on_ranks(1)
def test_accelerators_scalers_optimizers_and_modules_with_abstract_bases_train(rank, world_size):
    as_launched(rank, world_size)
    accelerator = AbstractAccelerator(parallelism_config=ZeroPlugin(3), cpu=True)
    scaler = accelerator.scaler = AbstractScaler("cpu", init_scale=4.0)
    model = nn.Sequential(AbstractLinear(8, 8), AbstractLinear(8, 8))
    optimizer = AbstractAdam(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=2)
    model, stepping, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        stepping.step()
        stepping.zero_grad()
    assert scaler.get_scale() == 4.0 and engine_of(model).optimizers[0].optimizer is optimizer
