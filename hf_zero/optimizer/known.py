"""A table of known optimizers: the values on which an element's update depends, according to their source code.

A trial of a few steps proves little: clipping inside an optimizer acts only at a spike, and a preconditioner may start after a
warm-up. So common classes are listed here by full name and settings, without importing their packages.
`tests/engine/test_known_optimizers.py` checks each installed class against its entry with longer runs.
"""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .trial import Finding, UpdateScope

_ELEMENT, _PARAMETER, _MODEL = UpdateScope.ELEMENT, UpdateScope.PARAMETER, UpdateScope.MODEL

_Widening = Mapping[str, tuple[tuple[Any, ...], UpdateScope]]
"""Setting → values that do not change the scope, and the scope with any other value."""


@dataclass(frozen=True)
class _Package:
    """The known classes of a package.

    Attributes:
        distribution: its name on PyPI; empty if all supported versions are known.
        read: the version whose source was read. For a different version, element-wise classes are tried as well.
        module: prefix of the classes' modules.
        classes: scope → names of classes below `module`.
        widened: settings that widen the scope.
    """

    distribution: str
    read: str
    module: str
    classes: Mapping[UpdateScope, str]
    widened: _Widening = field(default_factory=dict)


_CAUTIOUS: _Widening = {"caution": ((False,), _PARAMETER), "clipping_threshold": ((None,), _PARAMETER)}
_NORMED: _Widening = {
    "use_gc": ((False, None), _PARAMETER),
    "adanorm": ((False, None), _PARAMETER),
    "cautious": ((False, None), _PARAMETER),
    "stable_adamw": ((False, None), _PARAMETER),
}
_PROJECTED: _Widening = {"rank": ((None,), _PARAMETER)}

_PACKAGES = (
    _Package(
        "",
        "2.11 to 2.15",
        "torch.optim",
        {
            _ELEMENT: "adadelta.Adadelta, adagrad.Adagrad, adam.Adam, adamw.AdamW, adamax.Adamax, asgd.ASGD, nadam.NAdam, "
            "radam.RAdam, rmsprop.RMSprop, rprop.Rprop, sgd.SGD",
            _PARAMETER: "Adafactor, Muon",
        },
    ),
    _Package("", "5.17 to 5.24", "transformers", {_PARAMETER: "optimization.Adafactor"}),
    _Package(
        "bitsandbytes",
        "0.50.2",
        "bitsandbytes.optim",
        {
            # Blocks of 256 elements, settings of single parameters, and with `max_unorm` a norm.
            _PARAMETER: "adagrad.Adagrad, adagrad.Adagrad8bit, adagrad.Adagrad32bit, adam.Adam, adam.Adam8bit, "
            "adam.Adam32bit, adam.PagedAdam, adam.PagedAdam8bit, adam.PagedAdam32bit, adamw.AdamW, adamw.AdamW8bit, "
            "adamw.AdamW32bit, adamw.PagedAdamW, adamw.PagedAdamW8bit, adamw.PagedAdamW32bit, ademamix.AdEMAMix, "
            "ademamix.AdEMAMix8bit, ademamix.AdEMAMix32bit, ademamix.PagedAdEMAMix, ademamix.PagedAdEMAMix8bit, "
            "ademamix.PagedAdEMAMix32bit, lamb.LAMB, lamb.LAMB8bit, lamb.LAMB32bit, lars.LARS, lars.LARS8bit, "
            "lars.LARS32bit, lion.Lion, lion.Lion8bit, lion.Lion32bit, lion.PagedLion, lion.PagedLion8bit, "
            "lion.PagedLion32bit, rmsprop.RMSprop, rmsprop.RMSprop8bit, rmsprop.RMSprop32bit, sgd.SGD, sgd.SGD8bit, "
            "sgd.SGD32bit",
        },
    ),
    _Package(
        "torchao",
        "0.18.0",
        "torchao.optim",
        # State in blocks from 4,096 elements on, if the blocks are full; rounding by random numbers.
        {
            _PARAMETER: "adam.Adam8bit, adam.Adam4bit, adam.AdamFp8, adam.AdamW8bit, adam.AdamW4bit, adam.AdamWFp8, "
            "adam._AdamW"
        },
    ),
    _Package("prodigyopt", "1.1.2", "prodigyopt", {_MODEL: "prodigy.Prodigy, prodigy_reference.ProdigyReference"}),
    _Package(
        "dadaptation",
        "3.2",
        "dadaptation",
        {
            _MODEL: "dadapt_adagrad.DAdaptAdaGrad, dadapt_adam.DAdaptAdam, dadapt_adan.DAdaptAdan, dadapt_lion.DAdaptLion, "
            "dadapt_sgd.DAdaptSGD, experimental.dadapt_adam_preprint.DAdaptAdamPreprint, "
            "experimental.dadapt_adan_ip.DAdaptAdanIP"
        },
    ),
    _Package(
        "torch-optimi",
        "0.3.3",
        "optimi",
        {
            _ELEMENT: "adam.Adam, adamw.AdamW, adan.Adan, lion.Lion, radam.RAdam, ranger.Ranger, sgd.SGD",
            _PARAMETER: "stableadamw.StableAdamW",
        },
    ),
    _Package(
        "lion-pytorch",
        "0.2.5",
        "lion_pytorch",
        {_ELEMENT: "lion_pytorch.Lion, foreach.Lion, cautious_lion.Lion"},
        {"cautious_factor": ((1.0,), _PARAMETER)},
    ),
    _Package(
        "schedulefree",
        "1.4.1",
        "schedulefree",
        {
            _ELEMENT: "adamw_schedulefree.AdamWScheduleFree, adamw_schedulefree_paper.AdamWScheduleFreePaper, "
            "adamw_schedulefree_reference.AdamWScheduleFreeReference, radam_schedulefree.RAdamScheduleFree, "
            "sgd_schedulefree.SGDScheduleFree, sgd_schedulefree_reference.SGDScheduleFreeReference"
        },
    ),
    # beta1 is multiplied by a power of the parameter's index in its group.
    _Package("grokadamw", "0.1.2", "grokadamw", {_MODEL: "grokadamw.GrokAdamW"}),
    _Package(
        "galore-torch",
        "1.0",
        "galore_torch",
        {_ELEMENT: "adamw.AdamW", _PARAMETER: "adafactor.Adafactor, adamw8bit.AdamW8bit"},
        _PROJECTED,
    ),
    _Package(
        "apollo-torch",
        "1.0.3",
        "apollo_torch",
        {
            _ELEMENT: "adamw.AdamW, apollo.AdamW",
            _PARAMETER: "adafactor.Adafactor, adamw8bit.AdamW8bit, q_apollo.AdamW",
        },
        _PROJECTED,
    ),
    _Package("came-pytorch", "0.1.3", "came_pytorch", {_PARAMETER: "CAME.CAME"}),
    _Package("adabelief-pytorch", "0.2.1", "adabelief_pytorch", {_ELEMENT: "AdaBelief.AdaBelief"}),
    _Package("adan-pytorch", "0.1.0", "adan_pytorch", {_ELEMENT: "adan.Adan"}, {"restart_cond": ((None,), _PARAMETER)}),
    _Package("pytorch-lamb", "1.0.0", "pytorch_lamb", {_PARAMETER: "lamb.Lamb"}),
    _Package("muon-optimizer", "0.1.0", "muon", {_PARAMETER: "SingleDeviceMuon, SingleDeviceMuonWithAuxAdam"}),
    _Package(
        "timm",
        "1.0.31",
        "timm.optim",
        {
            _ELEMENT: "adabelief.AdaBelief, adamw.AdamWLegacy, adan.Adan, adopt.Adopt, laprop.LaProp, lion.Lion, "
            "madgrad.MADGRAD, nadam.NAdamLegacy, nadamw.NAdamW, radam.RAdamLegacy, rmsprop_tf.RMSpropTF, sgdw.SGDW",
            _PARAMETER: "adafactor.Adafactor, adafactor_bv.AdafactorBigVision, adamp.AdamP, lamb.Lamb, lars.Lars, "
            "mars.Mars, muon.Muon, nvnovograd.NvNovoGrad, sgdp.SGDP",
        },
        # LAMB clips by the norm of all gradients by default.
        {**_CAUTIOUS, "max_grad_norm": ((None,), _MODEL)},
    ),
    _Package(
        "pytorch-optimizer",
        "4.1.0",
        "pytorch_optimizer.optimizer",
        {
            _ELEMENT: "adabelief.AdaBelief, adabound.AdaBound, adadelta.AdaDelta, adamax.AdaMax, adamod.AdaMod, "
            "adapnm.AdaPNM, adasmooth.AdaSmooth, ademamix.AdEMAMix, ademamix.SimplifiedAdEMAMix, adopt.ADOPT, aggmo.AggMo, "
            "diffgrad.DiffGrad, grams.Grams, grokfast.GrokFastAdamW, laprop.LaProp, lion.Lion, madgrad.MADGRAD, "
            "padam.PAdam, pid.PID, pnm.PNM, qhadam.QHAdam, qhm.QHM, radam.RAdam, schedulefree.ScheduleFreeAdamW, "
            "schedulefree.ScheduleFreeRAdam, schedulefree.ScheduleFreeSGD, sgd.AccSGD, sgd.SGDW, sgd.SignSGD, tiger.Tiger, "
            "yogi.Yogi",
            _PARAMETER: "adafactor.AdaFactor, adalite.Adalite, adamp.AdamP, adamp.SGDP, adamw.StableAdamW, adanorm.AdaNorm, "
            "came.CAME, galore.GaLore, lars.LARS, mars.MARS, novograd.NovoGrad, shampoo.ScalableShampoo, shampoo.Shampoo, "
            "sm3.SM3, snsm.AdamWSN, soap.SOAP",
            _MODEL: "adagc.AdaGC, adai.Adai, avagrad.AvaGrad, dadapt.DAdaptAdaGrad, dadapt.DAdaptAdam, dadapt.DAdaptAdan, "
            "dadapt.DAdaptLion, dadapt.DAdaptSGD, prodigy.Prodigy, sgd.ASGD, swats.SWATS",
        },
        _NORMED,
    ),
    _Package(
        "pytorch-optimizer",
        "4.1.0",
        "pytorch_optimizer.optimizer",
        {_ELEMENT: "adan.Adan"},
        {**_NORMED, "max_grad_norm": ((0.0,), _MODEL)},
    ),
    _Package(
        "pytorch-optimizer",
        "4.1.0",
        "pytorch_optimizer.optimizer",
        {_PARAMETER: "lamb.Lamb"},
        {"pre_norm": ((False,), _MODEL)},
    ),
    _Package(
        "torch-optimizer",
        "0.3.0",
        "torch_optimizer",
        {
            _ELEMENT: "accsgd.AccSGD, adabelief.AdaBelief, adabound.AdaBound, adamod.AdaMod, aggmo.AggMo, "
            "diffgrad.DiffGrad, madgrad.MADGRAD, pid.PID, qhadam.QHAdam, qhm.QHM, radam.RAdam, sgdw.SGDW, yogi.Yogi",
            _PARAMETER: "adafactor.Adafactor, adamp.AdamP, apollo.Apollo, lamb.Lamb, lars.LARS, novograd.NovoGrad, "
            "sgdp.SGDP, shampoo.Shampoo",
            _MODEL: "swats.SWATS",
        },
    ),
)

KNOWN: dict[str, tuple[UpdateScope, _Package]] = {
    f"{package.module}.{name}": (scope, package)
    for package in _PACKAGES
    for scope, names in package.classes.items()
    for name in names.split(", ")
}
"""Full name of a class → its scope, and the package."""

_UNSUITED = {
    "LBFGS": "calls backward in the middle of its step",
    "Lomo": "steps inside backward",
    "LOMO": "steps inside backward",
    "AdaLomo": "steps inside backward",
    "AdaLOMO": "steps inside backward",
    "LayerWiseDummyOptimizer": "steps inside backward",
    "SparseAdam": "needs sparse gradients, which a flat bucket cannot hold",
    "muon.Muon": "gathers parameters over ranks inside its step",
    "muon.MuonWithAuxAdam": "gathers parameters over ranks inside its step",
}
"""Name of a class, or full name → the reason why no layout fits."""


def refuse_unsuited(optimizer: torch.optim.Optimizer) -> None:
    """Raises `ValueError` for an optimizer whose step cannot run over shards at all."""
    for kind in type(optimizer).__mro__:
        why = _UNSUITED.get(f"{kind.__module__}.{kind.__qualname__}") or _UNSUITED.get(kind.__qualname__)
        if why is not None:
            raise ValueError(
                f"hf_zero: the optimizer {type(optimizer).__name__} {why}, so it cannot be stepped over shards. Use AdamW, "
                "Adam, SGD, RMSprop, Adagrad, NAdam, RAdam, Lion, torch's Muon, Adafactor, ..., or train without hf_zero."
            )


@dataclass(frozen=True)
class Known:
    """A class's entry in the table.

    Attributes:
        finding: the scope and the reason.
        wants_trial: whether to try the class, because the installed version is not the one whose source was read.
    """

    finding: Finding
    wants_trial: bool


def known_scope(optimizer: torch.optim.Optimizer) -> Known | None:
    """Returns the scope of a known class with its settings; None for other classes."""
    kind = _known_class(type(optimizer))
    if kind is None:
        return None
    scope, package = KNOWN[_name(kind)]
    reason = "known"
    for setting, (inert, wider) in package.widened.items():
        # Some classes read a setting from the defaults or an attribute only.
        held = [
            where[setting]
            for where in (*optimizer.param_groups, optimizer.defaults, vars(optimizer))
            if setting in where
        ]
        if wider.reach > scope.reach and not all(_is_among(value, inert) for value in held):
            scope, reason = wider, f"known, with `{setting}`"
    is_read = not package.distribution or _version(package.distribution) == package.read
    return Known(Finding(scope, reason), scope is _ELEMENT and not is_read)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known_class(kind: type) -> type | None:
    """Returns the known class whose step this class inherits unchanged; None if there is none."""
    base = next((base for base in kind.__mro__ if _name(base) in KNOWN), None)
    if base is None:
        return None
    # A subclass may change the step or any method it calls, and a script may replace the class's own step.
    changed = {name for made in kind.__mro__[: kind.__mro__.index(base)] for name in vars(made)} - _HARMLESS
    known: Any = base
    is_own = known.step.__module__.split(".")[0] == base.__module__.split(".")[0]
    return base if is_own and not any(hasattr(base, name) for name in changed) else None


def _is_among(value: Any, inert: tuple[Any, ...]) -> bool:
    return any(value is one or (not torch.is_tensor(value) and value == one) for one in inert)


_HARMLESS = {"__init__", *vars(type("_", (), {})), "__annotations__", "__orig_bases__", "__parameters__"}
"""Attributes of a subclass that do not change a step."""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
