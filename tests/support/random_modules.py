"""Modules and training loops drawn at random, out of what people's models do beside a plain chain of layers."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 3
PARTS = ("norm", "scalar", "list", "empty", "twins", "buffer", "batch norm")
WHEN = ("even steps", "odd steps", "first steps", "last steps", "even ranks", "odd ranks", "never")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # A large eps: the rounding of a gradient that should be 0 makes no step of its own.
    "adamw": partial(torch.optim.AdamW, eps=1e-3),
    "adam": partial(torch.optim.Adam, eps=1e-3, weight_decay=0.01, amsgrad=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
}


class Block(nn.Module):
    """A layer with some of `PARTS`; `tied` is a layer whose weight it shares."""

    def __init__(self, width: int, parts: tuple[str, ...], tied: "Block | None"):
        super().__init__()
        self.linear = nn.Linear(width, width)
        if tied is not None:
            self.linear.weight = tied.linear.weight
        self.parts = parts
        if "norm" in parts:
            self.norm = nn.LayerNorm(width)
        if "scalar" in parts:
            self.scale = nn.Parameter(torch.tensor(0.7))
        if "list" in parts:
            self.list = nn.ParameterList([torch.randn(width) * 0.1 for _ in range(3)])
        if "empty" in parts:
            self.empty = nn.Parameter(torch.empty(0, width))
        if "twins" in parts:
            # Autograd hands both the same tensor.
            self.twins = nn.ParameterList([torch.randn(BATCH, width) * 0.1 for _ in range(2)])
        if "buffer" in parts:
            self.register_buffer("mean", torch.zeros(width))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        if "batch norm" in parts:
            self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.linear(hidden)
        if "norm" in self.parts:
            out = self.norm(out)
        if "list" in self.parts:
            out = out * self.list[0] + self.list[1] + self.list[2]
        if "empty" in self.parts:
            out = out + self.empty.sum()
        if "twins" in self.parts:
            out = out + (self.twins[0] + self.twins[1])
        if "buffer" in self.parts:
            out = out - 0.1 * self.mean.clone()
            with torch.no_grad():
                self.mean.mul_(0.9).add_(out.mean(0), alpha=0.1)
                self.calls += 1
        if "batch norm" in self.parts:
            out = out + self.batch_norm(out)
        out = torch.tanh(out)
        if "scalar" in self.parts:
            out = out * self.scale
        return hidden + out


@dataclass(frozen=True)
class Use:
    """One call of a block. `checkpointing`: "none", "reentrant" or "non-reentrant"."""

    block: int
    checkpointing: str
    when: str

    def runs(self, step: int, steps: int, rank: int) -> bool:
        return {
            "always": True,
            "even steps": step % 2 == 0,
            "odd steps": step % 2 == 1,
            "first steps": step < steps // 2,
            "last steps": step >= steps // 2,
            "even ranks": rank % 2 == 0,
            "odd ranks": rank % 2 == 1,
            "never": False,
        }[self.when]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A module and how it is trained.

    Attributes:
        parts: of each block.
        tied: of each block, the earlier one whose weight it shares.
        frozen: of each block, when it takes no gradients: one of `WHEN`, or "always".
        groups: of the optimizer, each with settings of its own.
        zeroing: who zeroes gradients ("optimizer", "model"), when, and `set_to_none`.
        reduces_each: micro-batches are reduced one by one, not under no_sync.
        settings: of the engine, beside the stage; `buffers`, how many large gradient buffers there are.
    """

    seed: int
    width: int
    parts: tuple[tuple[str, ...], ...]
    tied: tuple[int | None, ...]
    frozen: tuple[str, ...]
    uses: tuple[Use, ...]
    optimizer: str
    groups: int
    steps: int
    accumulation: int
    reduces_each: bool
    zeroing: tuple[str, str, bool]
    max_norm: float | None
    settings: dict

    @property
    def is_reentrant(self) -> bool:
        return any(use.checkpointing == "reentrant" for use in self.uses)

    @property
    def is_same_on_each_rank(self) -> bool:
        """Whether the ranks run the same layers in a step."""
        return not any(use.when.endswith("ranks") for use in self.uses)

    @property
    def is_same_each_step(self) -> bool:
        """Whether each step on each rank uses the same parameters."""
        return {use.when for use in self.uses} <= {"always", "never"} and set(self.frozen) <= {"always", "never"}

    def is_frozen(self, block: int, step: int) -> bool:
        return Use(block, "none", self.frozen[block]).runs(step, self.steps, rank=0)

    def make_model(self) -> "RandomModule":
        torch.manual_seed(self.seed)
        return RandomModule(self)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": parameters[group :: self.groups], "lr": 1e-2 / (1 + group), "weight_decay": 0.02 * group}
            for group in range(self.groups)
        ]
        return OPTIMIZERS[self.optimizer](groups)


class RandomModule(nn.Module):
    """The module of a case. Its first layer is never frozen: reentrant checkpointing needs inputs that take gradients."""

    def __init__(self, case: Case):
        super().__init__()
        self.entry = nn.Linear(case.width, case.width)
        self.blocks = nn.ModuleList()
        for parts, tied in zip(case.parts, case.tied):
            self.blocks.append(Block(case.width, parts, None if tied is None else self.blocks[tied]))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(case.width, 2)
        self.case = case
        self.freeze(0)

    def freeze(self, step: int) -> None:
        """Has the blocks take gradients that do so in this step."""
        for index, block in enumerate(self.blocks):
            block.requires_grad_(not self.case.is_frozen(index, step))

    def forward(self, inputs: torch.Tensor, step: int, rank: int) -> dict[str, torch.Tensor]:
        hidden = self.entry(inputs)
        for use in self.case.uses:
            if not use.runs(step, self.case.steps, rank):
                continue
            block = self.blocks[use.block]
            if use.checkpointing == "none":
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=use.checkpointing == "reentrant")
        return {"loss": (self.head(hidden * self.scale) - 1.0).square().mean(), "hidden": hidden.detach()}


def draw(seed: int) -> Case:
    """The case with this number, always the same."""
    r = random.Random(seed)
    count = r.randint(1, 4)
    checkpointings = r.choice([("none",), ("reentrant",), ("non-reentrant",), ("none", "reentrant", "non-reentrant")])
    branches = r.random() < 0.5
    uses = [
        Use(
            block=index if index < count else r.randrange(count),
            checkpointing=r.choice(checkpointings),
            when=r.choice(WHEN) if branches and r.random() < 0.4 else "always",
        )
        for index in range(count + r.randint(0, 3))
    ]
    r.shuffle(uses)
    freezes, ties = r.random() < 0.3, r.random() < 0.3
    # One frozen at the start and trained later is not in any optimizer.
    thawed = ("last steps", "odd steps", "always", "never")
    frozen = tuple(r.choice(thawed) if freezes else "never" for _ in range(count))
    return Case(
        seed=seed,
        width=r.randint(3, 9),
        parts=tuple(tuple(part for part in PARTS if r.random() < 0.3) for _ in range(count)),
        # Blocks that share a weight are not frozen: the one would thaw what the other froze.
        tied=tuple(
            r.randrange(index) if index and ties and not freezes and r.random() < 0.6 else None
            for index in range(count)
        ),
        frozen=frozen,
        uses=tuple(uses),
        optimizer=r.choice(list(OPTIMIZERS)),
        groups=r.randint(1, 3),
        # Even and odd ones, first and last ones: two of each.
        steps=4,
        accumulation=r.choice([1, 1, 2, 3]),
        reduces_each=r.random() < 0.3,
        zeroing=(
            r.choice(["optimizer", "model"]),
            r.choice(["after step", "before forward", "before backward"]),
            r.random() < 0.5,
        ),
        max_norm=r.choice([None, None, 0.5]),
        settings=dict(_settings(r)),
    )


def _settings(r: random.Random) -> Iterator[tuple[str, object]]:
    yield "bucket_bytes", r.choice([64, 300, 1000, "20KiB"])
    yield "buffers", r.choice([1, 2, 3])
    if r.random() < 0.3:
        yield "grad_accumulation", "local"
    if r.random() < 0.25:
        yield "offload", {"optimizer": "cpu", "speculate_bytes": r.choice([0, "1MiB"])}
