"""A torch device named `standin` and the process group of its tensors: how code for accelerators runs where there is none."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.futures import Future
from torch.utils.cpp_extension import load

NAME = "standin"


def build(folder: Path) -> Path:
    """Compiles the device into `folder`; needs a C++ compiler and ninja. Returns the library."""
    source = Path(__file__).with_suffix(".cpp")
    load("standin_device_c", [str(source)], build_directory=str(folder), extra_cflags=["-O1"], is_python_module=False)
    return folder / "standin_device_c.so"


def register(library: Path) -> ModuleType:
    """Makes the device known to torch in this process. Returns the compiled module, with its counts."""
    spec = spec_from_file_location("standin_device_c", library)
    compiled = module_from_spec(spec)
    spec.loader.exec_module(compiled)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(NAME, _ThroughTheHost, devices=[NAME, "cpu"])
    # torch knows the device of a renamed backend in the C function alone.
    torch.from_dlpack = lambda tensor: torch._C._from_dlpack(torch._C._to_dlpack(tensor))
    return compiled


@contextmanager
def process_group(rank: int, world_size: int, folder: str) -> Iterator[None]:
    """The default process group is one for the device's tensors."""
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(folder, "standin store"), world_size)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world_size)
    yield


def _device_module(compiled: ModuleType) -> ModuleType:
    module = ModuleType(f"torch.{NAME}")
    module.Stream = lambda device=None, priority=0: torch.Stream(device=NAME, priority=priority)
    module.Event = lambda enable_timing=False: torch.Event(device=NAME, enable_timing=enable_timing)
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.stream = _stream
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.memory_allocated = module.memory_reserved = lambda device=None: compiled.held()
    module.max_memory_allocated = lambda device=None: compiled.peak()
    module.mem_get_info = lambda device=None: (compiled.CAPACITY - compiled.held(), compiled.CAPACITY)
    return module


@contextmanager
def _stream(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class _Done(dist._Work):
    def __init__(self):
        super().__init__()
        self._future = Future()
        self._future.set_result(None)

    def wait(self, timeout=None) -> bool:
        return True

    def get_future(self) -> Future:
        return self._future


class _ThroughTheHost(ProcessGroup):
    """Collectives over copies in host memory, by gloo. Flat ones have the names of torch 2.13 and those before."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout):
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def barrier(self, options=None) -> _Done:
        self._gloo.barrier().wait()
        return _Done()

    def broadcast(self, tensors, options) -> _Done:
        return self._in_place(tensors, partial(self._gloo.broadcast, opts=options))

    def allreduce(self, tensors, options=None) -> _Done:
        return self._in_place(tensors, lambda copies: self._gloo.allreduce(copies, options or dist.AllreduceOptions()))

    def allgather(self, outputs, inputs, options=None) -> _Done:
        for parts, mine in zip(outputs, inputs):
            for part, theirs in zip(parts, self._everyones(mine)):
                part.detach().copy_(theirs.view(part.shape))
        return _Done()

    def all_gather_single(self, output, mine, options=None) -> _Done:
        output.detach().view(-1).copy_(torch.cat(self._everyones(mine)))
        return _Done()

    def reduce_scatter_single(self, output, flat, options=None) -> _Done:
        copy = _copy(flat)
        self._gloo.allreduce([copy]).wait()
        output.detach().view(-1).copy_(copy.chunk(self.size())[self.rank()])
        return _Done()

    def all_to_all_single(self, output, flat, output_sizes, input_sizes, options=None) -> _Done:
        parts = [theirs.chunk(self.size())[self.rank()] for theirs in self._everyones(flat)]
        output.detach().view(-1).copy_(torch.cat(parts))
        return _Done()

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _in_place(self, tensors, collective) -> _Done:
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        collective(copies).wait()
        for tensor, copy in zip(tensors, copies):
            tensor.detach().copy_(copy)
        return _Done()

    def _everyones(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty(mine.numel(), dtype=mine.dtype) for _ in range(self.size())]
        self._gloo.allgather([parts], [_copy(mine)]).wait()
        return parts


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).view(-1)
