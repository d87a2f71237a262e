"""Makes what tests share importable by its plain name: modules of support/ and of scripts/, which start ranks and count bytes."""

import atexit
import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Till all tests are collected: what is imported stays, and looking through it again and again takes a seventh of its time.
gc.disable()

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from packaging.version import Version  # noqa: E402

TESTS = Path(__file__).resolve().parent
SUPPORT, SCRIPTS = TESTS / "support", TESTS.parent / "scripts"

for folder in (SUPPORT, SCRIPTS / "bench", SCRIPTS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_home-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Scripts of bash call `python`, which is this one also where its environment has not been activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

import cells  # noqa: E402
import cpu_times  # noqa: E402
import rank_server  # noqa: E402
import ranks  # noqa: E402
import shared_ranks  # noqa: E402
import training  # noqa: E402, F401

from hf_zero.extras import EXTRAS, is_installed  # noqa: E402

# pytest-xdist sets the width of a terminal. Tables are tested at the width that they have without one.
os.environ.pop("COLUMNS", None)

# An extra is tested in the folder of its name, or where a test is marked with it.
collect_ignore = [folder for folder in EXTRAS if not is_installed(folder)]

# Imported once, by the process that the tests' ranks are forked from.
ranks.PRELOADED_MODULES += [
    "transformers.trainer_seq2seq",
    "hf_zero.integrations.arguments",
    "pytest",
    "hypothesis",
    "trainer_job",
    "accelerate_job",
    "split_runs",
    "warm_start",
]
ranks.PRELOAD_FOLDERS.append(SUPPORT)


# Longest first (`--cpu-times` shows them), so that no process of pytest's is left with one of them when the others have ended,
# and with them those that mostly wait, beside which others compute.
LONGEST_FIRST = (
    *("test_docs.py", "test_hub.py", "test_unmodified_scripts.py", "test_split_models.py", "test_late_ranks.py"),
    *("test_trainer.py", "test_stage3.py", "test_equivalence.py", "test_standin_device.py", "test_memory.py"),
    *(
        "test_kernels.py",
        "test_finetune.py",
        "test_races.py",
        "test_accelerate.py",
        "test_commit.py",
        "test_moments.py",
    ),
    *(
        "test_faults.py",
        "test_foreign_runs.py",
        "test_kernel_steps.py",
        "test_stage3_faults.py",
        "test_sharded_reads.py",
    ),
    *(
        "test_split_foreign.py",
        "test_split_checkpoints.py",
        "test_hybrid.py",
        "test_gradients.py",
        "test_quantized_wire.py",
    ),
    *(
        "test_sharded_checkpoints.py",
        "test_places.py",
        "test_nvme.py",
        "test_hostile_folders.py",
        "test_gather_dtype.py",
    ),
    *("test_comm.py", "test_resume.py", "test_savers.py", "test_dtypes.py", "test_uncommon_loops.py", "test_bench.py"),
    *("test_import.py", "test_rescue.py", "test_offload_params.py", "test_cli.py"),
    *("test_random_modules.py", "test_offload.py"),
)

# The same where slow tests run, too; those of the other list follow.
LONGEST_FIRST_WITH_SLOW = (
    *("test_races.py", "test_docs_in_minutes.py", "test_bench.py", "test_finetune.py", "test_core_alone.py"),
    *("test_preemption.py", "test_configs.py", "test_elastic_agents.py", "test_random_modules.py", "test_places.py"),
    *("test_forecast.py", "test_sequences.py", "test_skipped_layers.py", "test_parity.py", "test_memory.py"),
    *("test_late_ranks.py", "test_commit.py", "test_split_checkpoints.py", "test_hostile_folders.py"),
    *("test_split_models.py", "test_faults.py", "test_equivalence.py", "test_hub.py", "test_offload.py"),
    *("test_standin_doors.py", "test_auto.py", "test_packed_weights.py", "test_trainer.py", "test_stage3.py"),
    *("test_accelerate.py", "test_whole_parameters.py", "test_standin_device.py", "test_hybrid.py"),
)

# Examples of a property: the short run tries the same twenty each time, the long one a hundred at random. How long one takes says
# more of what else the machine does.
hypothesis.settings.register_profile("long", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile(
    "short", hypothesis.settings.get_profile("long"), max_examples=20, derandomize=True, database=None
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", action="store_true", help="CPU seconds of every test, file and folder, at the end")
    parser.addoption("--one-cell", action="store_true", help="the first cell alone of each test with several")
    parser.addoption(
        "--fuzz", type=int, default=10_000, help="inputs that the long suite gives to readers; 1000000 for a night"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(cpu_times.CpuTimes(config), "cpu_times")
    hypothesis.settings.load_profile("short" if config.getoption("markexpr") == "not slow" else "long")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cells.mark_slow(items, are_all=not any("::" in argument for argument in config.args))
    items[:] = [item for item in items if all(is_installed(mark.args[0]) for mark in item.iter_markers("extra"))]
    is_short = config.getoption("markexpr") == "not slow"
    if config.getoption("one_cell"):
        wanted = [item for item in items if not (is_short and item.get_closest_marker("slow"))]
        # The first of each test stays, and all in their order.
        first = {item.nodeid.partition("[")[0]: item for item in reversed(wanted)}
        items[:] = [item for item in wanted if first[item.nodeid.partition("[")[0]] is item]
    order = LONGEST_FIRST if is_short else dict.fromkeys((*LONGEST_FIRST_WITH_SLOW, *LONGEST_FIRST))
    places = {name: place for place, name in enumerate(order)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    try:
        found = yield
    finally:
        gc.enable()
    # Whatever pytest watches while it collects, it has let go of.
    if session.items and not session.config.option.collectonly:
        with captured(session.config):
            rank_server.fork_server()
    return found


@contextmanager
def captured(config: pytest.Config) -> Iterator[None]:
    """What is started within writes to where the output of tests is captured."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()
    yield
    capture.suspend_global_capture()


def pytest_collection_finish() -> None:
    """What is imported by now stays: each `gc.collect()` of a test would look through it for a quarter of a second."""
    gc.freeze()
    # As in ranks (warm_start.py): small models have few objects, and as many new ones a step.
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    # At the end, nanobind would name what it cannot free as leaked.
    atexit.register(gc.unfreeze)


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_ranks_place_outlives_its_test() -> Iterator[None]:
    """An Accelerator of a later test would look for other ranks at it."""
    before = {name: os.environ.get(name) for name in PLACE}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def no_watch_outlives_its_test() -> Iterator[None]:
    """A plugin that no Accelerator installs watches all optimizers of the process: here those of later tests, too."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = set(hooks)
    yield
    for added in set(hooks) - before:
        del hooks[added]


@pytest.fixture(autouse=True)
def no_process_group_outlives_its_test() -> Iterator[None]:
    """A later test of the same process would find itself in it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test has left its process group initialized")


@pytest.fixture(scope="module", autouse=True)
def no_shared_ranks_outlive_their_module() -> Iterator[None]:
    yield
    shared_ranks.shared_ranks.end()
    shared_ranks.four_ranks.end()


@pytest.fixture(scope="session")
def library() -> Path:
    """The stand-in for an accelerator, compiled."""
    import standin_device

    return standin_device.build()


@pytest.fixture(scope="session")
def splits_models() -> None:
    """Skips where transformers is older than the releases that `parallel_config` takes."""
    installed = importlib.metadata.version("transformers")
    if Version(installed) < Version("5.23"):
        pytest.skip(f"transformers {installed} splits no models over ranks as the engine takes them: 5.23 does")
