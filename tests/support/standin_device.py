"""A torch device named `standin` with its process group, to run code for accelerators on machines without one.

As `sdaa`, with a backend `tccl`, the device counts as a known accelerator for transformers and accelerate.
"""

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.utils.cpp_extension import load

NAME, BACKEND = "standin", "standin"
KNOWN_NAME, KNOWN_BACKEND = "sdaa", "tccl"

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None,
    reason="the stand-in device needs a C++ compiler and ninja",
)

_SOURCES = sorted(Path(__file__).parent.glob("standin_*.cpp"))
_MODULE = "standin_device_c"
# Optimize a little: traced steps take half the time, and compiling a tenth more. Turn asserts off: some of torch's asserts check
# fields which only debug builds have.
_FLAGS = ["-O1", "-DNDEBUG"]


def build() -> Path:
    """Compiles the device, or reuses an earlier result; needs a C++ compiler and ninja. Returns the library."""
    # The library also works in another folder with the same torch and the same Python.
    versions = (
        f"{torch.__version__} {torch.version.git_version} {torch.__config__.show()} {sysconfig.get_config_var('SOABI')}"
    )
    known = hashlib.sha256(f"{versions} {platform.python_version()} {_FLAGS}".encode())
    for source in [*_SOURCES, Path(__file__).with_suffix(".h")]:
        known.update(source.read_bytes())
    # The library is loaded into the process, so its folder must not be writable for others.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_zero-standin"
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"{known.hexdigest()[:16]}.so"
    # Otherwise the processes of a test run would all compile. The lock ends with its process.
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory() as folder:
                # Compile all sources as one, because most of the time is spent in torch's headers.
                whole = Path(folder) / f"{_MODULE}.cpp"
                whole.write_text("".join(f'#include "{source.resolve()}"\n' for source in _SOURCES))
                load(_MODULE, [str(whole)], build_directory=folder, extra_cflags=_FLAGS, is_python_module=False)
                # Rename, so the library is complete or absent.
                beside = library.with_suffix(".new")
                beside.write_bytes((Path(folder) / f"{_MODULE}.so").read_bytes())
                beside.rename(library)
    return library


@functools.cache
def register(library: Path, name: str = NAME, backend: str = BACKEND) -> ModuleType:
    """Registers the device and its backend with torch in this process, once. Returns the compiled module."""
    spec = spec_from_file_location(_MODULE, library)
    compiled = module_from_spec(spec)
    spec.loader.exec_module(compiled)
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, _device_module(compiled, name))
    torch.utils.generate_methods_for_privateuse1_backend()

    def communicator(options: object, _: object) -> dist.Backend:
        gloo = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        # As with NCCL, no rank continues before all have arrived. If a rank left early, connecting ranks would fail.
        gloo.barrier().wait()
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        limit_ms = int(options.timeout / timedelta(milliseconds=1))
        return compiled.communicator(gloo, ranks, f"communicator {options.group_id} of ranks {ranks}", limit_ms)

    dist.Backend.register_backend(backend, communicator, extended_api=True, devices=[name])
    return compiled


def register_known(library: Path) -> ModuleType:
    """Makes the device this process's accelerator for transformers and accelerate."""
    from accelerate.utils import is_sdaa_available
    from transformers import training_args

    package = sys.modules["torch_sdaa"] = ModuleType("torch_sdaa")
    package.__spec__ = ModuleSpec("torch_sdaa", None)
    compiled = register(library, KNOWN_NAME, KNOWN_BACKEND)
    is_sdaa_available.cache_clear()
    # transformers only checks kinds of accelerators it knows.
    training_args.is_torch_bf16_gpu_available = lambda: True
    os.environ["ACCELERATE_USE_CPU"] = "false"
    return compiled


@contextmanager
def process_group(
    rank: int, world_size: int, folder: str, backend: str = f"cpu:gloo,{NAME}:{BACKEND}", timeout_s: float = 300.0
) -> Iterator[None]:
    """Makes the default process group, with a backend for the device's tensors."""
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(folder, "standin store"), world_size)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    yield


@contextmanager
def keeping_freed(compiled: ModuleType) -> Iterator[None]:
    """Keeps freed memory of the device for later requests, as torch's allocator of CUDA memory does."""
    compiled.keep_freed(True)
    try:
        yield
    finally:
        compiled.keep_freed(False)


def _device_module(compiled: ModuleType, name: str) -> ModuleType:
    """Returns a module like torch.cuda, with the functions used here."""
    module = ModuleType(f"torch.{name}")
    module.spins = 0

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False):
            event = super().__new__(cls, device=name, enable_timing=enable_timing)
            event.blocking = blocking
            return event

        def synchronize(self) -> None:
            # A nonblocking wait keeps a core of the host busy.
            module.spins += not self.blocking
            super().synchronize()

        def elapsed_time(self, end: torch.Event) -> float:
            # torch.Event's own method requires exactly its own class.
            return 0.0

    def place(device: object = None) -> torch.device:
        found = torch.device(name, device) if isinstance(device, int) else torch.device(device or name)
        return found if found.index is not None else torch.device(name, module.current_device())

    @contextmanager
    def on(device: object) -> Iterator[None]:
        before = module.current_device()
        module.set_device(device)
        try:
            yield
        finally:
            module.set_device(before)

    @contextmanager
    def stream(wanted: torch.Stream) -> Iterator[None]:
        with on(wanted.device):
            before = module.current_stream()
            torch.accelerator.set_stream(wanted)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    module.Event, module.device, module.stream = Event, on, stream
    module.Stream = lambda device=None, priority=0: torch.Stream(device=place(device), priority=priority)
    module.current_stream = lambda device=None: torch.accelerator.current_stream(place(device))
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(place(device).index)
    module.synchronize = lambda device=None: torch.accelerator.synchronize(place(device))
    module.is_available = module.is_initialized = module.is_bf16_supported = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: compiled.DEVICES
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_rng_state_all = lambda: [torch.get_rng_state()]
    module.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.memory_allocated = module.memory_reserved = lambda device=None: compiled.held()
    module.max_memory_allocated = lambda device=None: compiled.peak()
    module.mem_get_info = lambda device=None: (compiled.CAPACITY - compiled.held(), compiled.CAPACITY)
    module.reset_peak_memory_stats = lambda device=None: None
    module.get_device_name = lambda device=None: f"stand-in {name}"
    module.empty_cache = lambda: None
    module.cudart = lambda: SimpleNamespace(
        cudaHostRegister=compiled.host_register, cudaHostUnregister=compiled.host_unregister
    )
    return module
